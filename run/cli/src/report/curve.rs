//! The slowdown of a run by its limit, as text, JSON and SVG.
use memfold_engine::config::Size;
use serde_json::{Value, json};
use svg::Document;
use svg::node::element::{Line, Polyline, Text};

/// Most lines of the text.
const LINES_MAX: usize = 16;
/// Columns of the longest bar.
const BAR_COLUMNS: f64 = 40.0;
/// Width, height and margin of the picture, in its own units.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const MARGIN: f64 = 60.0;

/// Limits in bytes, ascending, each with the slowdown in percent that it is estimated to cost. The
/// first one is the most that the run has held, with the slowdown that the run had.
#[derive(Clone, Debug, PartialEq)]
pub struct CurvePoints(pub Vec<(u64, f64)>);

impl CurvePoints {
    /// Reads what [`CurvePoints::json`] returned. Returns `None` for null and other values.
    pub fn from_json(value: &Value) -> Option<CurvePoints> {
        let point = |one: &Value| Some((one["limit_bytes"].as_u64()?, one["percent"].as_f64()?));
        value.as_array()?.iter().map(point).collect::<Option<Vec<_>>>().map(CurvePoints)
    }

    /// Returns an array with an object for each limit.
    pub fn json(&self) -> Value {
        let point = |(bytes, percent): &(u64, f64)| json!({"limit_bytes": bytes, "percent": (percent * 100.0).round() / 100.0});
        self.0.iter().map(point).collect()
    }

    /// Returns a line for each limit, of the first and of those at which the slowdown has changed
    /// most.
    pub fn lines(&self) -> Vec<String> {
        let most = self.0.iter().fold(f64::MIN_POSITIVE, |most, (_, percent)| percent.max(most));
        let line = |(bytes, percent): &(u64, f64)| {
            let bar = "#".repeat((percent / most * BAR_COLUMNS).round() as usize);
            format!("{:>10} {percent:>7.1}% {bar}", Size(*bytes).to_string())
        };
        self.picked(most).iter().map(line).collect()
    }

    /// Returns at most [`LINES_MAX`] points: the first, the last, and those that are apart enough.
    fn picked(&self, most: f64) -> Vec<(u64, f64)> {
        let mut points: Vec<(u64, f64)> = Vec::new();
        for (n, point) in self.0.iter().enumerate() {
            let is_last = n + 1 == self.0.len();
            let is_apart =
                points.last().is_none_or(|last| last.1 - point.1 >= most / (LINES_MAX - 2) as f64);
            if is_apart || is_last {
                points.push(*point);
            }
        }
        points
    }

    /// Returns a picture. The limits have a logarithmic scale.
    pub fn svg(&self) -> String {
        let (first, last) = match self.0.as_slice() {
            [] => return Document::new().to_string(),
            [first, .., last] => (first, last),
            [only] => (only, only),
        };
        let log = |bytes: u64| (bytes.max(1) as f64).ln();
        let width = (log(last.0) - log(first.0)).max(f64::MIN_POSITIVE);
        let most = self.0.iter().fold(f64::MIN_POSITIVE, |most, (_, percent)| percent.max(most));
        let x = |bytes: u64| MARGIN + (log(bytes) - log(first.0)) / width * (WIDTH - 2.0 * MARGIN);
        let y = |percent: f64| HEIGHT - MARGIN - percent / most * (HEIGHT - 2.0 * MARGIN);
        let points =
            self.0.iter().map(|(bytes, percent)| format!("{:.1},{:.1}", x(*bytes), y(*percent)));
        let curve = Polyline::new()
            .set("points", points.collect::<Vec<_>>().join(" "))
            .set("fill", "none")
            .set("stroke", "#1f6feb")
            .set("stroke-width", 2);
        let axis = |x1: f64, y1: f64, x2: f64, y2: f64| {
            let line = Line::new().set("x1", x1).set("y1", y1).set("x2", x2).set("y2", y2);
            line.set("stroke", "#888")
        };
        let label = |text: String, x: f64, y: f64, anchor: &str| {
            Text::new(text).set("x", x).set("y", y).set("text-anchor", anchor)
        };
        let (bottom, right) = (HEIGHT - MARGIN, WIDTH - MARGIN);
        let below = bottom + 20.0;
        Document::new()
            .set("viewBox", (0, 0, WIDTH as u32, HEIGHT as u32))
            .set("font-family", "sans-serif")
            .set("font-size", 12)
            .add(axis(MARGIN, bottom, right, bottom))
            .add(axis(MARGIN, MARGIN, MARGIN, bottom))
            .add(curve)
            .add(label(Size(first.0).to_string(), MARGIN, below, "middle"))
            .add(label(Size(last.0).to_string(), right, below, "middle"))
            .add(label("limit".to_string(), WIDTH / 2.0, below, "middle"))
            .add(label(format!("{most:.0}%"), MARGIN - 6.0, MARGIN + 4.0, "end"))
            .add(label("0%".to_string(), MARGIN - 6.0, bottom, "end"))
            .add(label("slowdown, by an estimate".to_string(), MARGIN, MARGIN - 12.0, "start"))
            .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: &mut u64) -> u64 {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *seed >> 33
    }

    #[test]
    fn any_curve_is_shown_whole_and_read_back() {
        let mut seed = 5;
        for count in 0..60 {
            let (mut bytes, mut percent) =
                (1u64 << 20, (random(&mut seed) % 100_000) as f64 / 100.0);
            let point = |_| {
                let point = (bytes, percent);
                bytes += 1 + random(&mut seed) % (64 << 20);
                percent = (percent * (random(&mut seed) % 100) as f64).round() / 100.0;
                point
            };
            let points = CurvePoints((0..count).map(point).collect());
            let lines = points.lines();
            assert!(lines.len() <= LINES_MAX && lines.is_empty() == (count == 0), "{lines:#?}");
            assert!(lines.iter().all(|line| line.len() <= 20 + BAR_COLUMNS as usize), "{lines:#?}");
            for point in [points.0.first(), points.0.last()].into_iter().flatten() {
                assert!(lines.iter().any(|line| line.contains(&Size(point.0).to_string())));
            }
            assert_eq!(CurvePoints::from_json(&points.json()), Some(points.clone()));
            let (text, nan) = (points.svg(), points.svg().contains("NaN"));
            assert!(text.starts_with("<svg") && text.ends_with('>') && !nan, "{text}");
        }
        assert_eq!(CurvePoints::from_json(&Value::Null), None);
    }
}
