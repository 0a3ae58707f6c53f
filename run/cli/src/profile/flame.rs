//! A flame graph of the recorded stacks, as SVG.
use crate::printable::printable;
use std::collections::BTreeMap;
use svg::Document;
use svg::node::element::{Group, Rectangle, Text, Title};

/// Sizes in pixels: the picture, its border, a frame, and a character of a name.
const WIDTH: f64 = 1200.0;
const BORDER: f64 = 10.0;
const HEAD: f64 = 28.0;
const FRAME_HEIGHT: f64 = 17.0;
const CHARACTER: f64 = 6.6;
/// Frames that are narrower are left out.
const FRAME_WIDTH_MIN: f64 = 0.4;

/// Stacks with their loads: the program and its functions, the outermost first.
pub type StackLoads = BTreeMap<Vec<String>, u64>;

/// What a frame is drawn from: the stacks that begin with it.
struct Frame<'a> {
    name: &'a str,
    depth: usize,
    /// Loads of the stacks before it, and its own.
    start: u64,
    loads: u64,
}

/// Returns the picture. Each frame is as wide as the loads of its stacks, and lies on the function that
/// called it. A title shows the whole name and the loads where the pointer is.
pub fn flame_graph(stacks: &StackLoads) -> String {
    let frames = frames(stacks);
    let total: u64 = stacks.values().sum();
    let scale = (WIDTH - 2.0 * BORDER) / total.max(1) as f64;
    let is_wide = |frame: &&Frame| frame.loads as f64 * scale >= FRAME_WIDTH_MIN;
    let shown: Vec<&Frame> = frames.iter().filter(is_wide).collect();
    let rows = shown.iter().map(|frame| frame.depth + 1).max().unwrap_or(0);
    let height = HEAD + rows as f64 * FRAME_HEIGHT + BORDER;
    let title = format!("{total} loads of folded memory, by the functions that made them");
    let head = Text::new(title).set("x", BORDER).set("y", 18).set("font-size", 14);
    let ground = Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "#fff");
    let document = Document::new()
        .set("viewBox", (0, 0, WIDTH as u32, height.ceil() as u32))
        .set("font-family", "monospace")
        .set("font-size", 11)
        .add(ground)
        .add(head);
    let y = |depth: usize| HEAD + (rows - 1 - depth) as f64 * FRAME_HEIGHT;
    let drawn = |frame: &&Frame| {
        let (x, width) = (BORDER + frame.start as f64 * scale, frame.loads as f64 * scale);
        let share = 100.0 * frame.loads as f64 / total.max(1) as f64;
        let title = format!("{}: {} loads, {share:.1}%", frame.name, frame.loads);
        let shape = Rectangle::new()
            .set("x", format!("{x:.1}"))
            .set("y", y(frame.depth))
            .set("width", format!("{width:.1}"))
            .set("height", FRAME_HEIGHT - 1.0)
            .set("fill", colour(frame.name));
        let group = Group::new().add(Title::new(printable(&title))).add(shape);
        let characters = ((width - 4.0) / CHARACTER).max(0.0) as usize;
        if characters < 3 {
            return group;
        }
        let name: String = printable(frame.name).chars().take(characters).collect();
        let (x, y) = (format!("{:.1}", x + 3.0), y(frame.depth) + 12.0);
        group.add(Text::new(name).set("x", x).set("y", y))
    };
    shown.iter().map(drawn).fold(document, Document::add).to_string()
}

/// Returns all frames. Stacks that begin alike lie side by side, because they are sorted.
fn frames(stacks: &StackLoads) -> Vec<Frame<'_>> {
    let mut all: Vec<Frame> = Vec::new();
    // The frames that the stack before ended with, as indices.
    let mut open: Vec<usize> = Vec::new();
    let mut start = 0;
    for (stack, loads) in stacks {
        let is_same = |(at, name): &(&usize, &String)| all[**at].name == name.as_str();
        let common = open.iter().zip(stack).take_while(is_same).count();
        open.truncate(common);
        for (depth, name) in stack.iter().enumerate().skip(common) {
            open.push(all.len());
            all.push(Frame { name, depth, start, loads: 0 });
        }
        open.iter().for_each(|at| all[*at].loads += loads);
        start += loads;
    }
    all
}

/// Returns a colour between yellow and red, which is always the same for a name.
fn colour(name: &str) -> String {
    let hash = name.bytes().fold(5381u32, |hash, byte| hash.wrapping_mul(33) ^ u32::from(byte));
    format!("hsl({},85%,{}%)", 15 + hash % 40, 62 + hash / 64 % 12)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stacks(lines: &[(&str, u64)]) -> StackLoads {
        let stack = |line: &str| line.split(';').map(str::to_string).collect();
        lines.iter().map(|(line, loads)| (stack(line), *loads)).collect()
    }

    #[test]
    fn frame_is_as_wide_as_its_loads_and_lies_on_its_caller() {
        let stacks = stacks(&[("a;main;f", 10), ("a;main;g", 20), ("a;main", 5), ("b;main", 65)]);
        let of = |frame: &Frame| (frame.name.to_string(), frame.depth, frame.start, frame.loads);
        let all: Vec<_> = frames(&stacks).iter().map(of).collect();
        let frame = |name: &str, depth, start, loads| (name.to_string(), depth, start, loads);
        assert_eq!(
            all,
            [
                frame("a", 0, 0, 35),
                frame("main", 1, 0, 35),
                frame("f", 2, 5, 10),
                frame("g", 2, 15, 20),
                frame("b", 0, 35, 65),
                frame("main", 1, 35, 65),
            ]
        );
    }

    #[test]
    fn picture_has_every_wide_frame_and_escapes_names() {
        let stacks = stacks(&[("x;f<int&>(\"\u{1b}\")", 999_000), ("x;rare", 1)]);
        let text = flame_graph(&stacks);
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        assert!(text.contains("f&lt;int&amp;&gt;(") && !text.contains('\u{1b}'), "{text}");
        assert!(text.contains("x: 999001 loads, 100.0%") && !text.contains("rare"), "{text}");
        assert!(!flame_graph(&StackLoads::new()).contains("NaN"));
    }
}
