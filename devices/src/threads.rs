//! Work on several items at once.

use std::panic;
use std::thread;

/// `work` on each of `items`, in a thread each, which `name` calls; the results in their order. Where the host gives
/// no more threads (a limit of processes, of memory), the work is done here instead.
pub fn on_each<I: Sync, T: Send>(
    items: &[I],
    name: impl Fn(&I) -> String,
    work: impl Fn(&I) -> T + Sync,
) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let started: Vec<_> = items
            .iter()
            .map(|item| {
                let thread = thread::Builder::new().name(name(item));
                let thread = thread.spawn_scoped(scope, move || work(item));
                (item, thread.ok())
            })
            .collect();
        let results = started.into_iter().map(|(item, thread)| match thread {
            Some(thread) => thread
                .join()
                .unwrap_or_else(|cause| panic::resume_unwind(cause)),
            None => work(item),
        });
        results.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let items: Vec<u64> = (0..8).collect();
        let results = on_each(&items, u64::to_string, |n| {
            thread::sleep(std::time::Duration::from_millis(8 - n));
            n * n
        });
        assert_eq!(results, [0, 1, 4, 9, 16, 25, 36, 49]);
    }
}
