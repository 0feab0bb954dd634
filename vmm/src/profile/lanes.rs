//! Puts slices of time into lanes so that in each lane any two either nest or do not touch. Slices
//! of one thread do so by themselves; those of a device may come from several threads at once.

use std::cmp::Reverse;

use super::Event;

/// A slice in its lane.
pub struct Placed<'a> {
    /// What.
    pub event: &'a Event,
    /// Which lane, from 0.
    pub lane: usize,
    /// How many slices of the lane it lies within.
    pub depth: usize,
}

/// Gives every slice the first lane that has room for it. The result is in order of time, an outer
/// slice before those within it.
pub fn lanes<'a>(slices: impl IntoIterator<Item = &'a Event>) -> Vec<Placed<'a>> {
    let mut slices: Vec<&Event> = slices.into_iter().collect();
    slices.sort_by_key(|slice| (slice.at, Reverse(slice.end())));
    // The ends of the slices that are open in each lane, outermost first.
    let mut open: Vec<Vec<std::time::Duration>> = Vec::new();
    let mut placed = Vec::new();
    for event in slices {
        for lane in &mut open {
            while lane.last().is_some_and(|end| *end <= event.at) {
                lane.pop();
            }
        }
        let fits = |lane: &Vec<_>| lane.last().is_none_or(|end| event.end() <= *end);
        let lane = match open.iter().position(fits) {
            Some(lane) => lane,
            None => {
                open.push(Vec::new());
                open.len() - 1
            }
        };
        let Some(ends) = open.get_mut(lane) else {
            continue;
        };
        placed.push(Placed {
            event,
            lane,
            depth: ends.len(),
        });
        ends.push(event.end());
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Subject;
    use std::time::Duration;

    fn slice(at: u64, took: u64) -> Event {
        Event {
            name: "slice",
            subject: Subject::Machine,
            thread: 1,
            at: Duration::from_millis(at),
            length: Some(Duration::from_millis(took)),
        }
    }

    #[test]
    fn slices_nest_or_go_to_another_lane() {
        let slices = [
            slice(0, 10),
            slice(2, 3),
            slice(8, 5),
            slice(10, 2),
            slice(13, 1),
        ];
        let placed: Vec<_> = lanes(&slices)
            .iter()
            .map(|placed| (placed.event.at.as_millis(), placed.lane, placed.depth))
            .collect();
        assert_eq!(
            placed,
            [(0, 0, 0), (2, 0, 1), (8, 1, 0), (10, 0, 0), (13, 0, 0)]
        );
    }
}
