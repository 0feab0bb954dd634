//! The results as a picture: a bar for each cell, of the phases from the VMM's exec to its end.
//!
//! The bars of one scenario with equal RAM share a scale, so that VMMs and hosts can be compared; another scenario has its own. The
//! picture is one SVG file that needs nothing else, on a white ground of its own.

use std::fs;
use std::path::PathBuf;

use maud::{Markup, PreEscaped, html};

use super::cell::{Cell, Vmm};
use super::metric::Metric;
use super::results::Measured;
use crate::error::Error;
use crate::paths;

/// Phases, each with the metric that tells its end and the class of its colour.
const PHASES: [(&str, Metric, &str); 4] = [
    (
        "exec to first guest instruction",
        Metric::FirstInstructionMs,
        "start",
    ),
    ("to init (0x41)", Metric::InitMs, "boot"),
    ("to GPUs in use (0x42)", Metric::InUseMs, "use"),
    ("to exit", Metric::ExitMs, "end"),
];
const STYLE: &str = "text{font:13px sans-serif;fill:#1b1f24}.heading{font-size:15px;font-weight:bold}.small{font-size:11px;\
    fill:#57606a}.inside{font-size:11px;fill:#ffffff}.grid{stroke:#d0d7de}.start{fill:#c93c37}.boot{fill:#3b6fb6}\
    .use{fill:#2c8a4b}.end{fill:#8a8f98}";

/// Units of the picture, which scales to the page.
const WIDTH: f64 = 1000.0;
/// What the names of the bars take.
const NAMES: f64 = 190.0;
const MARGIN: f64 = 14.0;
const LINE: f64 = 20.0;
const BAR: f64 = 20.0;
/// A bar, its line of numbers and some space.
const ROW: f64 = BAR + 24.0;
/// Heading and axis of a group.
const HEAD: f64 = 2.0 * LINE + 6.0;
/// A phase has its number within when each letter has so much room.
const LETTER: f64 = 7.5;
/// A phase that takes less is drawn so wide, to be seen.
const NARROWEST: f64 = 1.5;

/// Bars with one scale.
struct Group<'a> {
    heading: String,
    rows: Vec<&'a Measured>,
    /// Milliseconds at the right edge.
    end: f64,
}

impl Group<'_> {
    fn height(&self) -> f64 {
        HEAD + ROW * self.rows.len() as f64 + MARGIN
    }

    fn at(&self, milliseconds: f64) -> f64 {
        NAMES + (WIDTH - NAMES - 4.0 * MARGIN) * milliseconds / self.end
    }

    /// A round number of milliseconds, of which 4 to 10 are on the axis.
    fn tick(&self) -> f64 {
        let rough = self.end / 10.0;
        let power = 10f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
        steps
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(rough)
    }
}

/// Where the picture of what a bench shows is put.
pub fn path() -> PathBuf {
    paths::repository().join("target/lab/bench.svg")
}

/// The picture that docs/performance.md shows.
pub fn docs_path() -> PathBuf {
    paths::repository().join("docs/pictures/bench.svg")
}

/// Draws the cells into a file.
pub fn write(measured: &[&Measured], path: PathBuf) -> Result<PathBuf, Error> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(Error::file("create", directory))?;
    }
    fs::write(&path, picture(measured)).map_err(Error::file("write", &path))?;
    Ok(path)
}

/// The picture, in the order of the cells.
pub fn picture(measured: &[&Measured]) -> String {
    let groups = groups(measured);
    let legend = 2.0 * (LINE + MARGIN);
    let height = legend + groups.iter().map(Group::height).sum::<f64>();
    let mut top = legend;
    let placed = groups.iter().map(|group| {
        let at = top;
        top += group.height();
        (at, group)
    });
    let placed: Vec<(f64, &Group)> = placed.collect();
    let markup = html! {
        svg xmlns="http://www.w3.org/2000/svg" width=(WIDTH) height=(height) viewBox=(format!("0 0 {WIDTH} {height}")) role="img" {
            title { "From exec to the guest's use of its GPUs, by VMM and scenario" }
            style { (PreEscaped(STYLE)) }
            rect width=(WIDTH) height=(height) fill="#ffffff" {}
            (legend_of(MARGIN))
            @for (top, group) in placed { (draw_group(group, top)) }
        }
    };
    markup.into_string() + "\n"
}

fn groups<'a>(measured: &[&'a Measured]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group> = Vec::new();
    for &row in measured {
        let Cell {
            scenario, ram_mib, ..
        } = row.cell;
        let heading = format!("{scenario}: {}, {ram_mib} MiB of RAM", scenario.setting());
        let end = row.median(Metric::ExitMs).max(1e-3);
        match groups.iter_mut().find(|group| group.heading == heading) {
            Some(group) => {
                group.rows.push(row);
                group.end = group.end.max(end);
            }
            None => groups.push(Group {
                heading,
                rows: vec![row],
                end,
            }),
        }
    }
    groups
}

fn legend_of(top: f64) -> Markup {
    let step = (WIDTH - 2.0 * MARGIN) / PHASES.len() as f64;
    html! {
        text x=(MARGIN) y=(top + 12.0) { "Virtual time from the VMM's exec (one millisecond is a million instructions); less is better." }
        @for (number, (name, _, class)) in PHASES.iter().enumerate() {
            @let left = MARGIN + step * number as f64;
            rect class=(class) x=(left) y=(top + LINE) width="12" height="12" {}
            text x=(left + 17.0) y=(top + LINE + 11.0) { (name) }
        }
    }
}

fn draw_group(group: &Group, top: f64) -> Markup {
    let tick = group.tick();
    let bottom = top + group.height() - MARGIN;
    html! {
        text.heading x=(MARGIN) y=(top + 14.0) { (group.heading) }
        @for number in 0..=(group.end / tick) as u32 {
            @let time = f64::from(number) * tick;
            @let x = round(group.at(time));
            line.grid x1=(x) x2=(x) y1=(top + HEAD - 6.0) y2=(bottom) {}
            text.small x=(x) y=(top + HEAD - 10.0) text-anchor="middle" { (time) @if number == 0 { " ms" } }
        }
        @for (number, row) in group.rows.iter().enumerate() {
            (draw_row(group, row, top + HEAD + ROW * number as f64))
        }
    }
}

fn draw_row(group: &Group, row: &Measured, top: f64) -> Markup {
    let cell = &row.cell;
    let name = match cell.vmm {
        Vmm::MiniVmm => "mini-vmm",
        Vmm::Qemu => "QEMU",
    };
    let mut from = 0.0;
    let phases = PHASES.map(|(phase, metric, class)| {
        let (begin, end) = (from, row.median(metric).max(from));
        from = end;
        (phase, class, begin, end)
    });
    let numbers = PHASES.map(|(_, metric, _)| metric.show(row.median(metric)).replace(" ms", ""));
    html! {
        text x=(MARGIN) y=(top + 14.0) { (name) }
        text.small x=(MARGIN) y=(top + BAR + 12.0) { "host " (cell.host_kernel) ", " (cell.iommu) }
        @for (phase, class, begin, end) in phases { (draw_phase(group, phase, class, (begin, end), top)) }
        text.small x=(NAMES + 2.0) y=(top + BAR + 12.0) {
            "first instruction " (numbers[0]) ", init " (numbers[1]) ", GPUs in use " (numbers[2]) ", exit " (numbers[3]) " ms"
        }
    }
}

fn draw_phase(
    group: &Group,
    phase: &str,
    class: &str,
    (begin, end): (f64, f64),
    top: f64,
) -> Markup {
    let (left, right) = (group.at(begin), group.at(end));
    let width = (right - left).max(NARROWEST);
    let took = format!("{:.0}", end - begin);
    html! {
        rect class=(class) x=(round(left)) y=(top) width=(round(width)) height=(BAR) {
            title { (phase) ": " (format!("{:.3}", end - begin)) " ms" }
        }
        @if width > LETTER * (took.len() + 1) as f64 {
            text.inside x=(round(left + width / 2.0)) y=(top + 14.0) text-anchor="middle" { (took) }
        }
    }
}

/// Places to a hundredth are fine enough, and short.
fn round(place: f64) -> f64 {
    (place * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::super::cell::Scenario;
    use super::super::results::Results;
    use super::super::results::tests::measured;
    use super::*;
    use roxmltree::{Document, Node};

    fn results() -> Results {
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 1000));
        results.put(measured(Scenario::A, Vmm::Qemu, 512, 5000));
        results.put(measured(Scenario::B, Vmm::MiniVmm, 512, 100));
        results
    }

    fn picture_of(results: &Results) -> String {
        picture(&results.cells().iter().collect::<Vec<_>>())
    }

    fn number(node: &Node, attribute: &str) -> f64 {
        node.attribute(attribute).unwrap().parse().unwrap()
    }

    #[test]
    fn the_picture_is_svg_with_a_bar_of_all_phases_for_each_cell() {
        let text = picture_of(&results());
        let document = Document::parse(&text).unwrap();
        let svg = document.root_element();
        assert_eq!(
            svg.tag_name().namespace(),
            Some("http://www.w3.org/2000/svg")
        );
        let class = |class: &str| {
            let bars = svg.descendants().filter(|node| {
                node.has_tag_name(("http://www.w3.org/2000/svg", "rect"))
                    && node.attribute("class") == Some(class)
                    && node.children().any(|child| child.is_element())
            });
            bars.collect::<Vec<_>>()
        };
        for (_, _, name) in PHASES {
            assert_eq!(class(name).len(), 3, "{name}");
        }
        for (earlier, later) in [("start", "boot"), ("boot", "use"), ("use", "end")] {
            for (earlier, later) in class(earlier).iter().zip(class(later)) {
                let end = number(earlier, "x") + number(earlier, "width");
                assert!((end - number(&later, "x")).abs() < NARROWEST);
            }
        }
        // A scale for each scenario: the longest of each ends at the same place.
        let ends: Vec<f64> = class("end")
            .iter()
            .map(|bar| number(bar, "x") + number(bar, "width"))
            .collect();
        assert!((ends[1] - ends[2]).abs() < 0.1, "{ends:?}");
        assert!(ends[0] < ends[1] && ends[1] < WIDTH);
    }

    #[test]
    fn the_picture_tells_all_numbers_and_needs_nothing_else() {
        let text = picture_of(&results());
        let document = Document::parse(&text).unwrap();
        let words: String = document
            .descendants()
            .filter(Node::is_text)
            .filter_map(|node| node.text())
            .collect();
        for number in ["20.000", "4990.0", "5000.0", "10000.0", "100.0", "200.0"] {
            assert!(words.contains(number), "{number} in {words}");
        }
        assert!(!text.contains("href") && !text.contains("url("));
    }

    #[test]
    fn nothing_measured_is_a_picture_all_the_same() {
        assert!(Document::parse(&picture(&[])).is_ok());
    }
}
