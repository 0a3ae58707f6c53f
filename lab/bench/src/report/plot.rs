//! Plots as SVG that takes its text colour from the surrounding page, for light and dark.

use anyhow::anyhow;
use plotters::chart::MeshStyle;
use plotters::coord::ranged1d::{SegmentValue, ValueFormatter};
use plotters::prelude::*;

const WIDTH: u32 = 860;
const FONT: &str = "sans-serif";
/// Readable on white and on black.
const COLOURS: [RGBColor; 10] = [
    RGBColor(0x3b, 0x82, 0xf6),
    RGBColor(0xf5, 0x9e, 0x0b),
    RGBColor(0x10, 0xb9, 0x81),
    RGBColor(0xef, 0x44, 0x44),
    RGBColor(0x8b, 0x5c, 0xf6),
    RGBColor(0xec, 0x48, 0x99),
    RGBColor(0x14, 0xb8, 0xa6),
    RGBColor(0x84, 0xcc, 0x16),
    RGBColor(0xa1, 0x62, 0x07),
    RGBColor(0x64, 0x74, 0x8b),
];

/// A bar, with the minimum and maximum of its measurements.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Its label.
    pub name: String,
    /// Its length.
    pub value: f64,
    /// Minimum and maximum.
    pub range: (f64, f64),
    /// Its colour group.
    pub group: usize,
}

/// A line.
#[derive(Debug, Clone)]
pub struct Line {
    /// Its label in the legend.
    pub name: String,
    /// Its points (x, y).
    pub points: Vec<(f64, f64)>,
}

/// Axes of a plot of lines.
#[derive(Debug, Clone, Copy)]
pub struct Axes {
    /// The name of x, with its unit.
    pub x: &'static str,
    /// The name of y, with its unit.
    pub y: &'static str,
    /// The base of the logarithmic x axis, whose powers are marked; `None` for a linear axis.
    pub log_x: Option<f64>,
    /// The largest y, if it is known beforehand.
    pub y_max: Option<f64>,
}

/// Draws horizontal bars from the top down, with `unit` under the axis.
pub fn bars(unit: &str, bars: &[Bar]) -> anyhow::Result<String> {
    let mut svg = String::new();
    let top = bars.iter().map(|bar| bar.range.1.max(bar.value)).fold(0.0, f64::max);
    if bars.is_empty() || top <= 0.0 {
        return Err(anyhow!("nothing to draw"));
    }
    {
        let height = 22 * bars.len() as u32 + 64;
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let count = bars.len();
        let mut chart = ChartBuilder::on(&area)
            .margin(6)
            .margin_right(24)
            .x_label_area_size(44)
            .y_label_area_size(230)
            .build_cartesian_2d(0.0..top * 1.12, (0..count - 1).into_segmented())?;
        let name = |value: &SegmentValue<usize>| match value {
            SegmentValue::CenterOf(at) if *at < count => bars[count - 1 - at].name.clone(),
            _ => String::new(),
        };
        draw_mesh(
            chart
                .configure_mesh()
                .disable_y_mesh()
                .x_desc(unit)
                .y_labels(count)
                .y_label_formatter(&name)
                .x_label_formatter(&|x| short(*x)),
        )?;
        for (index, bar) in bars.iter().enumerate() {
            let at = count - 1 - index;
            let above =
                if at + 1 == count { SegmentValue::Last } else { SegmentValue::Exact(at + 1) };
            let corners = [(0.0, SegmentValue::Exact(at)), (bar.value, above)];
            let mut shape = Rectangle::new(corners, COLOURS[bar.group % COLOURS.len()].filled());
            shape.set_margin(3, 3, 0, 0);
            chart.draw_series(std::iter::once(shape))?;
            if bar.range.1 > bar.range.0 {
                let middle = |x| (x, SegmentValue::CenterOf(at));
                let line = PathElement::new(
                    vec![middle(bar.range.0), middle(bar.range.1)],
                    BLACK.mix(0.8),
                );
                chart.draw_series(std::iter::once(line))?;
            }
            let end = (bar.range.1.max(bar.value) + top * 0.008, SegmentValue::CenterOf(at));
            let style = (FONT, 12).into_font().color(&BLACK);
            let pos = plotters::style::text_anchor::Pos::new(
                plotters::style::text_anchor::HPos::Left,
                plotters::style::text_anchor::VPos::Center,
            );
            chart.draw_series(std::iter::once(Text::new(short(bar.value), end, style.pos(pos))))?;
        }
        area.present()?;
    }
    Ok(themed(&svg))
}

/// Draws lines with a legend.
pub fn lines(axes: Axes, lines: &[Line]) -> anyhow::Result<String> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let bound =
        |of: fn(&(f64, f64)) -> f64, pick: fn(f64, f64) -> f64| points().map(of).reduce(pick);
    let (Some(x_min), Some(x_max)) = (bound(|p| p.0, f64::min), bound(|p| p.0, f64::max)) else {
        return Err(anyhow!("nothing to draw"));
    };
    let y_max = axes
        .y_max
        .or(bound(|p| p.1, f64::max).map(|y| y * 1.05))
        .filter(|y| *y > 0.0)
        .unwrap_or(1.0);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, 380)).into_drawing_area();
        let mut builder = ChartBuilder::on(&area);
        builder.margin(10).margin_right(24).x_label_area_size(44).y_label_area_size(64);
        if let Some(base) = axes.log_x {
            let low = x_min.max(1e-3);
            let x = (low..x_max.max(low * 2.0)).log_scale().base(base);
            let mut chart = builder.build_cartesian_2d(x, 0.0..y_max)?;
            draw_lines(&mut chart, axes, lines)?;
        } else {
            let mut chart =
                builder.build_cartesian_2d(x_min.min(0.0)..x_max.max(x_min + 1e-9), 0.0..y_max)?;
            draw_lines(&mut chart, axes, lines)?;
        }
        area.present()?;
    }
    Ok(themed(&svg))
}

fn draw_lines<'a, X: Ranged<ValueType = f64> + ValueFormatter<f64>>(
    chart: &mut ChartContext<
        'a,
        SVGBackend<'a>,
        Cartesian2d<X, plotters::coord::types::RangedCoordf64>,
    >,
    axes: Axes,
    lines: &[Line],
) -> anyhow::Result<()> {
    draw_mesh(
        chart
            .configure_mesh()
            .x_desc(axes.x)
            .y_desc(axes.y)
            .x_labels(12)
            .x_label_formatter(&|x| short(*x))
            .y_label_formatter(&|y| short(*y)),
    )?;
    for (index, line) in lines.iter().enumerate() {
        let style = COLOURS[index % COLOURS.len()].stroke_width(2);
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), style))?
            .label(line.name.clone())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(if axes.log_x.is_some() {
            SeriesLabelPosition::LowerRight
        } else {
            SeriesLabelPosition::MiddleRight
        })
        .label_font((FONT, 13).into_font().color(&BLACK))
        .border_style(BLACK.mix(0.2))
        .draw()?;
    Ok(())
}

/// Draws axes and grid in the common style.
fn draw_mesh<X, Y>(mesh: &mut MeshStyle<'_, '_, X, Y, SVGBackend<'_>>) -> anyhow::Result<()>
where
    X: Ranged + ValueFormatter<<X as Ranged>::ValueType>,
    Y: Ranged + ValueFormatter<<Y as Ranged>::ValueType>,
{
    mesh.light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.15))
        .axis_style(BLACK.mix(0.5))
        .label_style((FONT, 13).into_font().color(&BLACK))
        .draw()?;
    Ok(())
}

/// Replaces black by the page's text colour, and makes the picture as wide as its container.
fn themed(svg: &str) -> String {
    let svg = svg.replace("#000000", "currentColor");
    match svg.find("<svg width=") {
        Some(at) => {
            let rest = &svg[at..];
            let end = rest.find("viewBox").unwrap_or(5);
            format!("<svg role=\"img\" {}", &rest[end..])
        }
        None => svg,
    }
}

/// Formats a figure in few characters.
pub fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}").trim_end_matches(".0").into(),
        v if v >= 0.01 => format!("{value:.2}").trim_end_matches('0').trim_end_matches('.').into(),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_its_names_and_takes_the_pages_colour() {
        let bar = |name: &str, value| Bar {
            name: name.into(),
            value,
            range: (value * 0.9, value * 1.1),
            group: 0,
        };
        let svg = bars("MB/s", &[bar("one", 100.0), bar("two", 50.0)]).unwrap();
        assert!(svg.starts_with("<svg role") && svg.contains("viewBox"), "{}", &svg[..200]);
        assert!(svg.contains("one") && svg.contains("two") && svg.contains("MB/s"));
        assert!(svg.contains("currentColor") && !svg.contains("#000000"));
        let axes = Axes { x: "us", y: "share", log_x: Some(10.0), y_max: Some(1.0) };
        let line =
            Line { name: "peer".into(), points: vec![(1.0, 0.1), (10.0, 0.5), (1000.0, 1.0)] };
        assert!(lines(axes, &[line]).unwrap().contains("peer"));
    }

    #[test]
    fn empty_data_gives_no_plot() {
        assert!(bars("MB/s", &[]).is_err());
        assert!(lines(Axes { x: "", y: "", log_x: None, y_max: None }, &[]).is_err());
    }

    #[test]
    fn figures_are_short() {
        let all = [0.0, 1234.5, 12.34, 12.0, 1.5, 0.25, 0.001].map(short);
        assert_eq!(all, ["0", "1234", "12.3", "12", "1.5", "0.25", "0.0010"]);
    }
}
