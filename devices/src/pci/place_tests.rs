use proptest::prelude::*;

use super::super::bar::BarKind;
use super::super::place_error::Bar;
use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const MEM32: BarKind = BarKind::Mem32 {
    prefetchable: false,
};
const MEM64: BarKind = BarKind::Mem64 {
    prefetchable: false,
};
const PREF64: BarKind = BarKind::Mem64 { prefetchable: true };

fn want(device: usize, index: u8, kind: BarKind, size: u64) -> PlaceRequest {
    PlaceRequest {
        device,
        bar: BarInfo { index, kind, size },
        fixed: None,
    }
}

fn at(request: PlaceRequest, address: u64) -> PlaceRequest {
    PlaceRequest {
        fixed: Some(address),
        ..request
    }
}

fn range(start: u64, end: u64) -> Range {
    Range::from_bounds(start, end)
}

/// 4 GiB of RAM around the hole below 4 GiB, 46 address bits.
fn windows() -> Windows {
    Windows {
        mmio32: range(0xc000_0000, 0xe000_0000),
        io: range(0xc000, 0x1_0000),
        ram: vec![range(0, 0xc000_0000), range(FOUR_GIB, FOUR_GIB + GIB)],
        usable_iova: None,
        address_limit: 1 << 46,
        reserved: vec![
            range(0xe000_0000, 0xf000_0000),
            range(0xfec0_0000, FOUR_GIB),
        ],
        mmio64_size: None,
    }
}

fn vtd39() -> Windows {
    Windows {
        usable_iova: Some(vec![range(0, 0xfee0_0000), range(0xfef0_0000, 1 << 39)]),
        ..windows()
    }
}

/// What must hold of every placement.
fn check(requests: &[PlaceRequest], windows: &Windows, placement: &Placement) {
    assert_eq!(placement.addresses.len(), requests.len());
    let mut taken: Vec<(bool, usize, Range, Range)> = Vec::new();
    for (request, &(device, index, address)) in requests.iter().zip(&placement.addresses) {
        let bar = request.bar;
        assert_eq!((request.device, bar.index), (device, index));
        assert!(address != 0 && address % bar.size == 0, "{address:#x}");
        assert!(request.fixed.is_none_or(|f| f == address));
        let exact = Range::new(address, bar.size).unwrap();
        let page = range(address & !0xfff, exact.end().next_multiple_of(PAGE));
        assert!(exact.end() <= bar.limit());
        if bar.is_io() {
            assert!(windows.io.covers(&exact));
        } else {
            let low = windows.mmio32.covers(&exact);
            let high = placement.mmio64.is_some_and(|w| w.covers(&exact));
            assert!(low || (high && bar.is_64bit()), "{exact}");
            assert!(exact.end() <= windows.address_limit || low);
            let usable = windows.usable_iova.as_ref();
            assert!(usable.is_none_or(|u| u.iter().any(|r| r.covers(&page))));
            for blocked in windows
                .ram
                .iter()
                .chain(&windows.reserved)
                .chain([&HT_HOLE])
            {
                assert!(!blocked.overlaps(&page), "{page} over {blocked}");
            }
        }
        for (io, other, other_exact, other_page) in &taken {
            if *io == bar.is_io() {
                assert!(!other_exact.overlaps(&exact));
                let pages_apart = *io || *other == device || !other_page.overlaps(&page);
                assert!(pages_apart, "{page} holds two devices");
            }
        }
        taken.push((bar.is_io(), device, exact, page));
    }
    if let Some(window) = placement.mmio64 {
        assert!(window.start() >= FOUR_GIB && window.end() <= windows.address_limit);
        for blocked in windows
            .ram
            .iter()
            .chain(&windows.reserved)
            .chain([&HT_HOLE])
        {
            assert!(!blocked.overlaps(&window));
        }
        let inside = placement.addresses.iter().zip(requests);
        let held: u64 = inside
            .filter(|(a, _)| window.contains(a.2))
            .map(|(_, r)| r.bar.size)
            .sum();
        assert!(!placement.roomy || window.len() / 2 >= held);
        if let Some(usable) = &windows.usable_iova {
            assert!(usable.iter().any(|r| r.covers(&window)));
        }
    }
}

fn placed(requests: &[PlaceRequest], windows: &Windows) -> Placement {
    let placement = place(requests, windows).unwrap();
    check(requests, windows, &placement);
    assert_eq!(
        place(requests, windows).unwrap(),
        placement,
        "not deterministic"
    );
    placement
}

#[test]
fn eight_gpus_with_huge_bars_get_a_window_of_twice_their_size() {
    let gpu = |d| {
        [
            want(d, 0, MEM32, 16 * MIB),
            want(d, 1, PREF64, 128 * GIB),
            want(d, 3, PREF64, 32 * MIB),
            want(d, 5, BarKind::Io, 128),
        ]
    };
    let requests: Vec<_> = (0..8).flat_map(gpu).collect();
    let placement = placed(&requests, &windows());
    let window = placement.mmio64.unwrap();
    assert!(placement.roomy && window.len() == 4 * TIB);
    assert_eq!(window.start() % (128 * GIB), 0);
    // 1 TiB and a bit do not fit below the HyperTransport hole.
    assert!(window.start() >= HT_HOLE.end());
    assert_eq!(placement.address(9, 0), None);
}

#[test]
fn kinds_go_where_a_linux_guest_keeps_them() {
    let requests = [
        want(0, 0, MEM64, 16 << 10),
        want(0, 2, MEM64, 128 * MIB),
        want(1, 0, PREF64, MIB),
        want(1, 2, BarKind::Mem32 { prefetchable: true }, MIB),
    ];
    let placement = placed(&requests, &windows());
    let high = |n: usize| placement.addresses[n].2 >= FOUR_GIB;
    assert_eq!(
        [high(0), high(1), high(2), high(3)],
        [false, true, true, false]
    );
}

#[test]
fn small_64_bit_bars_yield_to_32_bit_ones() {
    let requests = [want(0, 0, MEM64, 64 * MIB), want(1, 0, MEM32, 512 * MIB)];
    let placement = placed(&requests, &windows());
    assert_eq!(placement.address(1, 0), Some(0xc000_0000));
    assert!(placement.address(0, 0).unwrap() >= FOUR_GIB);
}

#[test]
fn sub_page_bars_never_share_a_page() {
    let requests: Vec<_> = (0..6).map(|d| want(d, 0, MEM32, 16 << d)).collect();
    placed(&requests, &windows());
}

#[test]
fn a_bar_beyond_the_iommu_is_refused_by_name() {
    let requests = [want(0, 0, MEM32, MIB), want(1, 2, PREF64, 512 * GIB)];
    let error = place(&requests, &vtd39()).unwrap_err();
    let bar = error.bar().unwrap();
    assert_eq!((bar.device, bar.bar, bar.size), (1, 2, 512 * GIB));
    let text = error.to_string();
    assert!(
        text.starts_with("BAR 2 (512 GiB) does not fit below the IOMMU's limit of 2^39: "),
        "{text}"
    );
    // Without peer-to-peer the IOMMU has no say.
    placed(&requests, &windows());
    let narrow = Windows {
        address_limit: 1 << 39,
        ..windows()
    };
    let text = place(&requests, &narrow).unwrap_err().to_string();
    assert!(text.contains("the processor's limit of 2^39"), "{text}");
}

#[test]
fn a_bar_that_fits_only_below_the_iommu_limit_goes_there() {
    let placement = placed(&[want(0, 0, PREF64, 16 * GIB)], &vtd39());
    assert!(placement.mmio64.unwrap().end() <= 1 << 39);
    assert!(placement.roomy);
}

#[test]
fn a_window_of_less_than_twice_is_taken_but_told() {
    let placement = placed(&[want(0, 0, PREF64, 256 * GIB)], &vtd39());
    assert!(!placement.roomy);
    assert_eq!(placement.mmio64, Some(range(256 * GIB, 512 * GIB)));
}

#[test]
fn the_hypertransport_hole_is_avoided_and_reserved_ranges_too() {
    let mut w = windows();
    w.ram.push(range(FOUR_GIB, 0xfc_0000_0000));
    let placement = placed(&[want(0, 0, PREF64, 16 * GIB)], &w);
    assert_eq!(placement.mmio64.unwrap().start(), TIB);
    w.reserved.push(range(TIB + GIB, TIB + 2 * GIB));
    let placement = placed(&[want(0, 0, PREF64, 16 * GIB)], &w);
    assert_eq!(placement.mmio64.unwrap().start(), TIB + 16 * GIB);
}

#[test]
fn the_window_size_can_be_chosen() {
    let requests = [want(0, 0, PREF64, 16 * GIB)];
    let sized = |size| Windows {
        mmio64_size: Some(size),
        ..windows()
    };
    let placement = placed(&requests, &sized(2 * TIB));
    assert_eq!(placement.mmio64.unwrap().len(), 2 * TIB);
    assert!(!placed(&requests, &sized(16 * GIB)).roomy);
    let error = place(&requests, &sized(8 * GIB)).unwrap_err();
    assert_eq!(
        error,
        PlaceError::WindowTooSmall {
            size: 8 * GIB,
            needed: 16 * GIB
        }
    );
    let text = place(&requests, &sized(1 << 50)).unwrap_err().to_string();
    assert!(text.contains("--mmio64-size"), "{text}");
    assert_eq!(placed(&[], &sized(GIB)).mmio64.unwrap().len(), GIB);
    assert_eq!(placed(&[], &windows()).mmio64, None);
}

#[test]
fn full_windows_name_what_did_not_fit() {
    let many: Vec<_> = (0..5).map(|d| want(d, 0, MEM32, 128 * MIB)).collect();
    let error = place(&many, &windows()).unwrap_err();
    assert!(matches!(
        error,
        PlaceError::NoRoom32 {
            bar: Bar { device: 4, .. },
            ..
        }
    ));
    let ports: Vec<_> = (0..65).map(|d| want(d, 4, BarKind::Io, 256)).collect();
    let error = place(&ports, &windows()).unwrap_err();
    assert!(matches!(
        error,
        PlaceError::NoPorts {
            bar: Bar {
                device: 64,
                bar: 4,
                ..
            },
            ..
        }
    ));
    let one = [want(0, 1, PREF64, 1 << 63)];
    assert!(matches!(
        place(&one, &windows()),
        Err(PlaceError::NoRoom64 { .. })
    ));
}

#[test]
fn chosen_places_are_kept_and_the_rest_goes_around_them() {
    let requests = [
        want(0, 0, PREF64, 16 * GIB),
        at(want(1, 0, PREF64, 16 * GIB), 32 * GIB),
        at(want(1, 2, MEM32, MIB), 0xc000_0000),
        want(0, 2, MEM32, MIB),
        at(want(2, 0, BarKind::Io, 64), 0xc000),
        want(2, 1, BarKind::Io, 64),
    ];
    let placement = placed(&requests, &windows());
    assert_eq!(placement.address(0, 2), Some(0xc010_0000));
    assert_eq!(placement.address(2, 1), Some(0xc040));
    // Far up: the window goes there.
    let far = [
        at(requests[0], 0x3800_0000_0000),
        want(1, 0, PREF64, 16 * GIB),
    ];
    let window = placed(&far, &windows()).mmio64.unwrap();
    assert_eq!(window.start(), 0x3800_0000_0000);
}

#[test]
fn chosen_places_that_cannot_be_are_refused_with_the_reason() {
    let refuse = |requests: &[PlaceRequest], w: &Windows| match place(requests, w) {
        Err(PlaceError::Fixed { obstacle, .. }) => obstacle,
        other => panic!("{other:?}"),
    };
    let gpu = want(0, 0, PREF64, 16 * GIB);
    let w = windows();
    assert_eq!(refuse(&[at(gpu, 33 * GIB)], &w), Obstacle::Misaligned);
    assert_eq!(refuse(&[at(gpu, 0)], &w), Obstacle::Misaligned);
    assert!(matches!(
        refuse(&[at(gpu, 1 << 46)], &w),
        Obstacle::TooHigh { .. }
    ));
    let small = want(0, 0, PREF64, MIB);
    assert!(matches!(
        refuse(&[at(small, FOUR_GIB)], &w),
        Obstacle::Ram(_)
    ));
    assert!(matches!(
        refuse(&[at(small, 0xfd_0000_0000)], &w),
        Obstacle::Reserved(_)
    ));
    assert!(matches!(
        refuse(&[at(small, 0xf800_0000)], &w),
        Obstacle::OutsideWindow { .. }
    ));
    assert_eq!(refuse(&[at(gpu, 1 << 40)], &vtd39()), Obstacle::Iommu);
    let low = want(0, 0, MEM32, MIB);
    assert!(matches!(
        refuse(&[at(low, 32 * GIB)], &w),
        Obstacle::TooHigh { .. }
    ));
    let port = want(0, 0, BarKind::Io, 64);
    assert!(matches!(
        refuse(&[at(port, 0x300)], &w),
        Obstacle::OutsideWindow { .. }
    ));
    let twice = [
        at(low, 0xc000_0000),
        at(want(1, 0, MEM32, MIB), 0xc000_0000),
    ];
    assert!(matches!(
        refuse(&twice, &w),
        Obstacle::Bar(Bar { device: 0, .. })
    ));
}

#[test]
fn chosen_places_on_both_sides_of_a_hole_are_refused_by_name() {
    let requests = [
        at(want(0, 0, PREF64, GIB), 0xfc_0000_0000),
        at(want(1, 0, PREF64, GIB), TIB),
    ];
    let error = place(&requests, &windows()).unwrap_err();
    assert!(matches!(
        error,
        PlaceError::NoRoom64 {
            bar: Bar { device: 1, .. },
            ..
        }
    ));
}

#[test]
fn chosen_sub_page_bars_share_a_page_within_one_device_only() {
    let a = at(want(0, 0, MEM32, 256), 0xc000_0000);
    placed(&[a, at(want(0, 1, MEM32, 256), 0xc000_0100)], &windows());
    assert!(place(&[a, at(want(1, 1, MEM32, 256), 0xc000_0100)], &windows()).is_err());
}

fn any_request() -> impl Strategy<Value = PlaceRequest> {
    let bar = prop_oneof![
        (2u32..9).prop_map(|s| (BarKind::Io, 1u64 << s)),
        (4u32..28, any::<bool>()).prop_map(|(s, p)| (BarKind::Mem32 { prefetchable: p }, 1 << s)),
        (4u32..40, any::<bool>()).prop_map(|(s, p)| (BarKind::Mem64 { prefetchable: p }, 1 << s)),
    ];
    (
        bar,
        0usize..4,
        0u8..6,
        prop::option::weighted(0.1, 0u64..1 << 20),
    )
        .prop_map(|((kind, size), device, index, spot)| PlaceRequest {
            device,
            bar: BarInfo { index, kind, size },
            fixed: spot.map(|s| match kind {
                BarKind::Io => 0xc000 + (s & 0x3fff & !(size - 1)),
                BarKind::Mem32 { .. } => 0xc000_0000 + ((s << 12) & 0x1fff_ffff & !(size - 1)),
                BarKind::Mem64 { .. } => (s << 22) & !(size - 1),
            }),
        })
}

fn any_windows() -> impl Strategy<Value = Windows> {
    let reserved = prop::collection::vec((0u64..1 << 14, 1u64..64), 0..4);
    (
        0u64..2048,
        36u32..53,
        prop::option::of(34u32..53),
        reserved,
        prop::option::weighted(0.2, 1u64..1 << 44),
    )
        .prop_map(|(ram, bits, iova, reserved, mmio64_size)| Windows {
            ram: vec![range(0, 0xc000_0000), range(FOUR_GIB, FOUR_GIB + ram * GIB)],
            usable_iova: iova.map(|b| vec![range(0, 0xfee0_0000), range(0xfef0_0000, 1 << b)]),
            address_limit: 1 << bits,
            reserved: reserved
                .iter()
                .map(|&(s, l)| range(s << 28, (s + l) << 28))
                .collect(),
            mmio64_size,
            ..windows()
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn placements_are_legal_or_refused(
        requests in prop::collection::vec(any_request(), 0..16),
        w in any_windows(),
    ) {
        match place(&requests, &w) {
            Ok(placement) => {
                check(&requests, &w, &placement);
                prop_assert_eq!(Ok(placement), place(&requests, &w));
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn without_wishes_a_wide_address_space_always_has_room(
        mut requests in prop::collection::vec(any_request(), 0..12),
    ) {
        requests.iter_mut().for_each(|r| r.fixed = None);
        requests.retain(|r| !matches!(r.bar.kind, BarKind::Mem32 { .. }) || r.bar.size <= 32 * MIB);
        let placement = place(&requests, &windows()).unwrap();
        check(&requests, &windows(), &placement);
        prop_assert!(placement.roomy);
    }
}
