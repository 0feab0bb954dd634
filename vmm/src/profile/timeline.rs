//! The timeline as an SVG picture: a row for each thread and each assigned device, a bar for each
//! phase and call, a line for each moment.

use std::time::Duration;

use maud::{Markup, html};

use super::lanes::{Placed, lanes};
use super::report::milliseconds;
use super::{Event, Record, Subject};

/// Units of the picture; it scales to the page.
const WIDTH: f64 = 1200.0;
/// What the names of the rows take.
const NAMES: f64 = 130.0;
/// A bar that lies within none.
const BAR: f64 = 18.0;
/// A bar is so much lower than the one that it lies within.
const STEP: f64 = 4.0;
const LOWEST_BAR: f64 = 4.0;
const GAP: f64 = 6.0;
/// Lines of text above the rows: that of the axis, then those of the moments.
const LINE: f64 = 14.0;
/// A bar shows its name when each letter has so much room.
const LETTER: f64 = 6.0;
/// Bars narrower than this are drawn so wide, to be seen.
const NARROWEST: f64 = 0.6;
/// Half of the longest text of the axis.
const AXIS_TEXT: f64 = 40.0;
/// Classes of bars, which have a colour each, and what they are.
const COLOURS: [(&str, &str); 4] = [
    ("phase", "a phase of the VMM"),
    ("ram", "guest RAM: populated and mapped"),
    ("device", "a device: opened and reset"),
    ("call", "a call about a device or a BAR"),
];
/// More lines are drawn, but have no text: it would be in the way of itself.
const MOMENT_LINES: usize = 8;

struct Row<'a> {
    name: String,
    slices: Vec<Placed<'a>>,
}

impl Row<'_> {
    fn lanes(&self) -> usize {
        let lanes = self.slices.iter().map(|placed| placed.lane + 1);
        lanes.max().unwrap_or(1)
    }

    fn height(&self) -> f64 {
        self.lanes() as f64 * (BAR + 1.0) + GAP
    }
}

/// The picture of all that began before `end`.
pub fn picture(record: &Record, end: Duration) -> Markup {
    let rows = rows(record, end);
    let moments = moments(record, end);
    let head = LINE * (2 + moments.len().min(MOMENT_LINES)) as f64;
    let height = head + rows.iter().map(Row::height).sum::<f64>() + GAP;
    let scale = Scale::new(end);
    let mut top = head;
    let placed: Vec<(f64, &Row)> = rows
        .iter()
        .map(|row| {
            let at = top;
            top += row.height();
            (at, row)
        })
        .collect();
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height}")) xmlns="http://www.w3.org/2000/svg" role="img" {
            (axis(&scale, height))
            @for (top, row) in placed { (draw_row(row, top, &scale)) }
            @for (number, moment) in moments.iter().enumerate() {
                (draw_moment(moment, number, head, height, &scale))
            }
        }
    }
}

/// Threads in the order in which they appear, then devices.
fn rows(record: &Record, end: Duration) -> Vec<Row<'_>> {
    let all = || record.events.iter().chain(&record.calls);
    let shown = || all().filter(|e| e.length.is_some() && e.at < end);
    let mut rows = Vec::new();
    let mut threads: Vec<(Duration, i32)> = Vec::new();
    for event in shown() {
        match threads.iter_mut().find(|(_, known)| *known == event.thread) {
            Some((first, _)) => *first = event.at.min(*first),
            None => threads.push((event.at, event.thread)),
        }
    }
    threads.sort();
    for (_, thread) in threads {
        rows.push(Row {
            name: record.thread_name(thread).to_owned(),
            slices: lanes(shown().filter(|event| event.thread == thread)),
        });
    }
    let mut devices: Vec<_> = shown().filter_map(|e| e.subject.device()).collect();
    devices.sort();
    devices.dedup();
    for bdf in devices {
        rows.push(Row {
            name: bdf.to_string(),
            slices: lanes(shown().filter(|event| event.subject.device() == Some(bdf))),
        });
    }
    rows
}

fn moments(record: &Record, end: Duration) -> Vec<&Event> {
    let all = record.events.iter();
    all.filter(|event| event.length.is_none() && event.at <= end)
        .collect()
}

/// From times to places.
struct Scale {
    end: f64,
}

impl Scale {
    fn new(end: Duration) -> Self {
        Self {
            end: milliseconds(end).max(1e-6),
        }
    }

    fn at(&self, time: Duration) -> f64 {
        self.at_ms(milliseconds(time))
    }

    fn at_ms(&self, time: f64) -> f64 {
        NAMES + (WIDTH - NAMES - GAP) * (time / self.end).min(1.0)
    }

    /// A round number of milliseconds, of which 5 to 12 are on the axis.
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

fn axis(scale: &Scale, height: f64) -> Markup {
    let tick = scale.tick();
    let count = (scale.end / tick) as u32;
    html! {
        @for number in 0..=count {
            @let time = f64::from(number) * tick;
            @let x = round(scale.at_ms(time));
            line.grid x1=(x) x2=(x) y1=(LINE) y2=(round(height)) {}
            // Text in the middle of its line, but within the picture.
            @let anchor = if x > WIDTH - AXIS_TEXT { "end" } else { "middle" };
            text.axis x=(x) y=(LINE - 3.0) text-anchor=(anchor) { (short(time)) " ms" }
        }
    }
}

/// What the colours of the bars stand for.
pub fn legend() -> Markup {
    html! {
        p.note {
            @for (class, meaning) in COLOURS {
                svg.swatch viewBox="0 0 10 10" xmlns="http://www.w3.org/2000/svg" {
                    rect class=(class) width="10" height="10" {}
                }
                (meaning)
            }
        }
    }
}

fn draw_row(row: &Row, top: f64, scale: &Scale) -> Markup {
    html! {
        rect.row x="0" y=(round(top - GAP / 2.0)) width=(WIDTH) height=(round(row.height() - 2.0)) {}
        text x="4" y=(round(top + BAR - 5.0)) { (row.name) }
        @for slice in &row.slices { (draw_slice(slice, top, scale)) }
    }
}

fn draw_slice(slice: &Placed, top: f64, scale: &Scale) -> Markup {
    let event = slice.event;
    let (left, right) = (scale.at(event.at), scale.at(event.end()));
    let width = (right - left).max(NARROWEST);
    let height = (BAR - STEP * slice.depth as f64).max(LOWEST_BAR);
    let top = top + slice.lane as f64 * (BAR + 1.0) + BAR - height;
    let title = event.title();
    let took = milliseconds(event.length.unwrap_or_default());
    let at = milliseconds(event.at);
    html! {
        rect class=(format!("slice {}", class(event))) x=(round(left)) y=(round(top)) width=(round(width)) height=(round(height)) {
            title { (title) ": " (format!("{took:.3} ms at {at:.3} ms")) }
        }
        @if slice.depth == 0 && width > LETTER * title.chars().count() as f64 {
            text.inside x=(round(left + 3.0)) y=(round(top + BAR - 5.0)) { (title) }
        }
    }
}

fn draw_moment(event: &Event, number: usize, head: f64, height: f64, scale: &Scale) -> Markup {
    let x = scale.at(event.at);
    let y = 2.0 * LINE + LINE * number.min(MOMENT_LINES) as f64;
    // Text at the right edge grows to the left.
    let (anchor, shift) = match x > WIDTH * 0.75 {
        true => ("end", -3.0),
        false => ("start", 3.0),
    };
    let from = if number < MOMENT_LINES {
        y - 10.0
    } else {
        head
    };
    html! {
        line.moment x1=(round(x)) x2=(round(x)) y1=(round(from)) y2=(round(height)) {
            title { (event.title()) ": " (format!("{:.3} ms", milliseconds(event.at))) }
        }
        @if number < MOMENT_LINES {
            text.moment-text x=(round(x + shift)) y=(round(y)) text-anchor=(anchor) { (event.title()) }
        }
    }
}

/// The colour of a bar.
fn class(event: &Event) -> &'static str {
    match (event.name, event.subject) {
        (_, Subject::Ram) => "ram",
        ("open and reset" | "open device", _) => "device",
        (_, Subject::Device(_) | Subject::Bar(..)) => "call",
        (_, Subject::Machine) => "phase",
    }
}

/// Places to a hundredth are fine enough, and short.
fn round(place: f64) -> f64 {
    (place * 100.0).round() / 100.0
}

/// A number without needless zeros.
fn short(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;
    use roxmltree::Document;

    #[test]
    fn the_picture_is_xml_with_a_bar_for_each_slice_and_a_line_for_each_moment() {
        let profile = Profile::start();
        let bdf = "0000:41:00.0".parse().unwrap();
        {
            let _span = profile.span("load <kernel> & initrd");
            profile.call("map DMA", Subject::Bar(bdf, 2), || ());
        }
        profile.mark("moment");
        let record = profile.snapshot();
        let end = record.moment("moment").unwrap();
        let picture = picture(&record, end).into_string();
        let document = Document::parse(&picture).unwrap();
        let count = |tag: &str, class: &str| {
            let all = document
                .descendants()
                .filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", tag)));
            all.filter(|node| {
                node.attribute("class")
                    .unwrap_or("")
                    .split(' ')
                    .any(|c| c == class)
            })
            .count()
        };
        let legend = legend().into_string();
        for node in document.descendants() {
            if let Some(colour) = node
                .attribute("class")
                .and_then(|c| c.strip_prefix("slice "))
            {
                assert!(legend.contains(&format!("class=\"{colour}\"")), "{colour}");
            }
        }
        // The call is on the row of its thread and on that of its device.
        assert_eq!(count("rect", "slice"), 3);
        assert_eq!(count("rect", "row"), 2);
        assert_eq!(count("line", "moment"), 1);
        assert!(count("line", "grid") >= 2);
        for node in document.descendants() {
            for name in ["x", "y", "width", "height", "x1", "y2"] {
                if let Some(value) = node.attribute(name) {
                    let number: f64 = value.parse().unwrap();
                    assert!((0.0..=1e5).contains(&number), "{name}={value}");
                }
            }
        }
    }

    #[test]
    fn ticks_are_round_and_neither_few_nor_many() {
        for end in [0.001, 0.7, 3.0, 34.2, 999.0, 123_456.0] {
            let scale = Scale { end };
            let count = end / scale.tick();
            assert!((4.0..=10.0).contains(&count), "{end}: {count}");
        }
    }
}
