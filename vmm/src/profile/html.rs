//! The profile as one page for a browser, which needs nothing but itself: the timeline as a picture,
//! the phases, the calls, and what would make the start faster.

use std::time::Duration;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::advice::advice;
use super::ranking::ranking;
use super::report::milliseconds;
use super::{FIRST_INSTRUCTION, Record, timeline};

const STYLE: &str = include_str!("page.css");

/// The page.
pub fn page(record: &Record) -> String {
    let start = record.moment(FIRST_INSTRUCTION);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                title { "mini-vmm: boot profile" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Boot profile" }
                (summary(record))
                (timeline::legend())
                @if let Some(start) = start {
                    h2 { "Until the first guest instruction" }
                    (timeline::picture(record, start))
                }
                h2 { "The whole start" }
                (timeline::picture(record, last(record)))
                (faster(record))
                (ranked(record))
                (phases(record))
                (calls(record))
            }
        }
    };
    page.into_string()
}

/// The moments, which are what most readers want.
fn summary(record: &Record) -> Markup {
    let moments = record.events.iter().filter(|event| event.length.is_none());
    html! {
        table {
            tr { th { "moment" } th { "ms" } }
            @for event in moments {
                tr { td { (event.title()) } td.number { (time(event.at)) } }
            }
        }
        @for note in &record.notes { p.note { (note) } }
    }
}

fn faster(record: &Record) -> Markup {
    let advice = advice(record);
    html! {
        h2 { "What would make it faster on this host" }
        @if advice.is_empty() {
            p { "Nothing that mini-vmm knows of." }
        }
        ul { @for sentence in advice { li { (sentence) } } }
    }
}

fn ranked(record: &Record) -> Markup {
    let all = record.moment(FIRST_INSTRUCTION).unwrap_or_default();
    let percent = |time: Duration| 100.0 * time.as_secs_f64() / all.as_secs_f64();
    html! {
        h2 { "Where the time until the first guest instruction went" }
        table {
            tr { th { "phase of the main thread" } th { "ms" } th { "%" } }
            @for share in ranking(record) {
                tr {
                    td { (share.name) }
                    td.number { (time(share.time)) }
                    td.number { (format!("{:.1}", percent(share.time))) }
                }
            }
        }
    }
}

fn phases(record: &Record) -> Markup {
    html! {
        h2 { "Phases" }
        table {
            tr { th { "at ms" } th { "took ms" } th { "phase" } th { "thread" } }
            @for event in &record.events {
                tr {
                    td.number { (time(event.at)) }
                    td.number { @if let Some(length) = event.length { (time(length)) } }
                    td { (event.title()) }
                    td { (record.thread_name(event.thread)) }
                }
            }
        }
    }
}

fn calls(record: &Record) -> Markup {
    html! {
        h2 { "Calls and accesses, by class, device and BAR" }
        table {
            tr { th { "class" } th { "about" } th { "calls" } th { "total ms" } th { "longest ms" } }
            @for ((class, subject), tally) in &record.tallies {
                tr {
                    td { (class) }
                    td { (subject) }
                    td.number { (tally.count) }
                    td.number { (time(tally.total)) }
                    td.number { (time(tally.longest)) }
                }
            }
        }
    }
}

/// The end of what was recorded.
fn last(record: &Record) -> Duration {
    let ends = record.events.iter().map(|event| event.end());
    ends.max().unwrap_or_default()
}

fn time(duration: Duration) -> String {
    format!("{:.3}", milliseconds(duration))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Profile, Subject};

    #[test]
    fn the_page_is_whole_and_escapes_what_it_shows() {
        let profile = Profile::start();
        {
            let _span = profile.span("phase");
            let bdf = "0000:41:00.0".parse().unwrap();
            profile.call("map DMA", Subject::Bar(bdf, 2), || ());
        }
        profile.mark(FIRST_INSTRUCTION);
        profile.note("a <b> & \"c\"".to_owned());
        let page = page(&profile.snapshot());
        assert!(page.starts_with("<!DOCTYPE html>"));
        assert!(page.contains("a &lt;b&gt; &amp; "), "{page}");
        assert!(page.contains("0000:41:00.0 BAR 2"));
        assert_eq!(page.matches("<svg viewBox").count(), 2);
        for outside in ["src=", "href=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn a_profile_of_nothing_is_a_page() {
        let page = page(&Record::default());
        assert_eq!(page.matches("<svg viewBox").count(), 1);
        assert!(!page.contains("NaN"));
    }
}
