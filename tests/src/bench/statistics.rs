//! Few numbers that should be equal.

/// Where two runs differ by more than this share, a third decides.
pub const TOLERANCE: f64 = 0.02;

/// The middle one, or the mean of the middle two; 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), sorted.len() % 2) {
        (Some(upper), 0) => {
            let lower = sorted.get(middle - 1).unwrap_or(upper);
            (lower + upper) / 2.0
        }
        (Some(value), _) => *value,
        (None, _) => 0.0,
    }
}

/// By what share of the median the greatest exceeds the least; 0 where all are 0.
pub fn spread(values: &[f64]) -> f64 {
    let middle = median(values);
    if middle == 0.0 {
        return 0.0;
    }
    let greatest = values.iter().copied().fold(f64::MIN, f64::max);
    let least = values.iter().copied().fold(f64::MAX, f64::min);
    (greatest - least) / middle
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_not_moved_by_one_that_is_off() {
        assert_eq!(median(&[3.0, 1.0, 100.0]), 3.0);
        assert_eq!(median(&[2.0, 1.0]), 1.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn the_spread_is_a_share_of_the_median() {
        assert_eq!(spread(&[100.0, 98.0, 101.0]), 0.03);
        assert_eq!(spread(&[7.0]), 0.0);
        assert_eq!(spread(&[0.0, 0.0]), 0.0);
    }
}
