use proptest::prelude::*;

use super::super::image::write_u32;
use super::super::spec::{ExtHeader, FIRST_EXT_CAP};
use super::*;

/// Builds configuration spaces.
struct Image(Vec<u8>);

impl Image {
    fn new() -> Self {
        let mut image = vec![0; CONFIG_SIZE];
        write_u16(
            &mut image,
            Reg::STATUS.offset(),
            (Status::CAP_LIST | Status::INTERRUPT).bits(),
        );
        Self(image)
    }

    fn first(mut self, offset: u8) -> Self {
        self.0[Reg::CAPABILITIES.at()] = offset;
        self
    }

    fn cap(mut self, offset: u8, id: CapId, next: u8, body: &[u8]) -> Self {
        self.0[usize::from(offset)] = id.0;
        self.0[usize::from(offset) + 1] = next;
        write(&mut self.0, u16::from(offset) + 2, body);
        self
    }

    fn ext(mut self, offset: u16, id: ExtCapId, next: u16, body: &[u8]) -> Self {
        write_u32(&mut self.0, offset, ExtHeader::new(id, 1, next).0);
        write(&mut self.0, offset + 4, body);
        self
    }

    /// A PCI Express endpoint whose only capability is that, at 0x40.
    fn express() -> Self {
        Self::new()
            .first(0x40)
            .cap(0x40, CapId::PCIE, 0, &[2, 0, 0, 0, 0, 0x10])
    }
}

/// Walks both lists as a careless guest would, with a bound.
fn guest_walk(image: &[u8]) -> Vec<(AnyCapId, u16)> {
    let mut found = Vec::new();
    let status = Status::from_bits_retain(read_u16(image, Reg::STATUS.offset()));
    let mut at = u16::from(image[Reg::CAPABILITIES.at()]);
    assert_eq!(status.contains(Status::CAP_LIST), at != 0);
    while at != 0 {
        assert!((0x40..0x100).contains(&at) && at % 4 == 0);
        found.push((AnyCapId::Standard(CapId(image[usize::from(at)])), at));
        assert!(found.len() <= 48, "the standard list does not end");
        at = image[usize::from(at) + 1].into();
    }
    let mut at = FIRST_EXT_CAP;
    let mut steps = 0;
    while at != 0 && image.len() == CONFIG_SIZE {
        let header = ExtHeader(read_u32(image, at));
        assert_ne!(header.0, u32::MAX);
        if header.id() != ExtCapId::NULL {
            found.push((AnyCapId::Extended(header.id()), at));
        }
        steps += 1;
        assert!(steps <= 961, "the extended list does not end");
        at = header.next();
        assert!(at == 0 || at > FIRST_EXT_CAP);
    }
    found
}

fn kept(caps: &Capabilities) -> Vec<(AnyCapId, u16)> {
    caps.kept.iter().map(|c| (c.id, c.offset)).collect()
}

fn std_cap(id: CapId, offset: u16) -> (AnyCapId, u16) {
    (AnyCapId::Standard(id), offset)
}

fn ext_cap(id: ExtCapId, offset: u16) -> (AnyCapId, u16) {
    (AnyCapId::Extended(id), offset)
}

#[test]
fn what_works_is_kept_and_described() {
    let mut image = Image::new()
        .first(0x60)
        .cap(0x60, CapId::PM, 0x68, &[3, 0, 8, 0])
        .cap(0x68, CapId::MSI, 0x78, &[0x86, 1])
        .cap(0x80, CapId::PCIE, 0xbc, &[2, 0, 0xe1, 0x8f, 0, 0x10])
        .cap(0xbc, CapId::VENDOR, 0xd0, &[0x14, 1, 2, 3])
        .cap(
            0xd0,
            CapId::MSIX,
            0,
            &[0x80, 0, 3, 0x52, 0, 0, 5, 0xd6, 0, 0],
        )
        .0;
    // MSI is 24 bytes long here: 0x68 to 0x80. Its pointer was wrong on purpose above.
    image[0x69] = 0x80;
    let caps = filter(&mut image);
    assert_eq!(caps.pm, Some(PmCap { offset: 0x60 }));
    let msi = caps.msi.unwrap();
    assert_eq!((msi.is_64, msi.maskable, msi.max_vectors), (true, true, 8));
    assert_eq!(msi.bytes(), 24);
    let msix = caps.msix.unwrap();
    assert_eq!(msix.vectors, 129);
    assert_eq!(
        (msix.table, msix.pba),
        (
            Location {
                bar: 3,
                offset: 0x5200
            },
            Location {
                bar: 5,
                offset: 0xd600
            }
        )
    );
    let pcie = caps.pcie.unwrap();
    assert!(pcie.flr);
    assert_eq!((pcie.len, pcie.port_type), (0x3c, PortType::ENDPOINT));
    assert_eq!(guest_walk(&image), kept(&caps));
    assert_eq!(caps.kept.len(), 5);
    assert_eq!(caps.hidden, []);
}

#[test]
fn hidden_standard_capabilities_are_unlinked_and_zeroed() {
    let mut image = Image::new()
        .first(0x40)
        .cap(0x40, CapId::AF, 0x48, &[6, 3, 0, 0])
        .cap(0x48, CapId::PM, 0x50, &[3, 0, 0, 0])
        .cap(0x50, CapId(0x77), 0x60, &[0xaa; 14])
        .cap(0x60, CapId::VENDOR, 0x70, &[0x10])
        .cap(0x70, CapId::SSVID, 0, &[1, 2, 3, 4])
        .0;
    image[0x47] = 0x5a; // A register behind AF that is no capability.
    let caps = filter(&mut image);
    assert_eq!(
        guest_walk(&image),
        [std_cap(CapId::PM, 0x48), std_cap(CapId::VENDOR, 0x60)]
    );
    assert_eq!(image[0x40..0x46], [0; 6]);
    assert_eq!(image[0x47], 0x5a);
    assert_eq!(image[0x50..0x60], [0; 16]);
    assert_eq!(caps.hidden.len(), 3);
}

#[test]
fn nothing_left_clears_the_status_bit_only() {
    let mut image = Image::new().first(0x40).cap(0x40, CapId::HT, 0, &[1, 1]).0;
    assert!(filter(&mut image).kept.is_empty());
    assert_eq!(read_u16(&image, Reg::STATUS.offset()), 8);
    assert_eq!(image[Reg::CAPABILITIES.at()], 0);
}

#[test]
fn without_the_status_bit_there_is_no_list() {
    let mut image = Image::express().0;
    write_u16(&mut image, Reg::STATUS.offset(), 0);
    assert_eq!(filter(&mut image), Capabilities::default());
    assert_eq!(image[Reg::CAPABILITIES.at()], 0);
}

#[test]
fn loops_pointers_into_the_header_and_ones_end_the_list() {
    let two = |next| {
        Image::new()
            .first(0x41)
            .cap(0x40, CapId::PM, 0x48, &[])
            .cap(0x48, CapId::VENDOR, next, &[8])
    };
    for next in [0x40, 0x48, 0x3c, 0x01, 0x80] {
        let mut image = two(next);
        image.0[0x80] = 0xff;
        assert_eq!(filter(&mut image.0).kept.len(), 2, "next {next:#x}");
        assert_eq!(guest_walk(&image.0).len(), 2);
    }
    let mut gone = vec![0xff; CONFIG_SIZE];
    assert_eq!(filter(&mut gone), Capabilities::default());
    assert!(guest_walk(&gone).is_empty());
}

#[test]
fn a_capability_is_kept_once_and_only_with_room() {
    let mut image = Image::new()
        .first(0x40)
        .cap(0x40, CapId::PM, 0x44, &[])
        .cap(0x44, CapId::PM, 0x4c, &[])
        .cap(0x4c, CapId::PM, 0xfc, &[])
        .cap(0xfc, CapId::MSI, 0, &[])
        .0;
    let caps = filter(&mut image);
    // The first overlaps the second, the third is a second one, the fourth leaves the space.
    assert_eq!(guest_walk(&image), [std_cap(CapId::PM, 0x44)]);
    assert_eq!(caps.hidden.len(), 3);
    assert_eq!(caps.msi, None);
}

#[test]
fn an_msix_table_in_a_bar_that_cannot_exist_hides_the_capability() {
    for body in [
        [0, 0, 6, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 7, 0, 0, 0],
    ] {
        let mut image = Image::new().first(0x40).cap(0x40, CapId::MSIX, 0, &body).0;
        let caps = filter(&mut image);
        assert_eq!((caps.msix, caps.kept.len()), (None, 0));
    }
}

#[test]
fn a_long_express_capability_is_cut_where_the_next_begins() {
    let mut image = Image::new()
        .first(0xd0)
        .cap(0xd0, CapId::PCIE, 0xf0, &[2, 0])
        .cap(0xf0, CapId::PM, 0, &[])
        .0;
    assert_eq!(filter(&mut image).pcie.unwrap().len, 0x20);
}

#[test]
fn sriov_rebar_and_ats_are_hidden_and_the_list_still_ends() {
    // As igb shows them, with the serial number kept in between (case 13).
    let mut image = Image::express()
        .ext(0x100, ExtCapId::AER, 0x150, &[0x11; 0x44])
        .ext(0x150, ExtCapId::ARI, 0x160, &[1; 4])
        .ext(0x160, ExtCapId::SRIOV, 0x1a0, &[0x22; 0x3c])
        .ext(0x1a0, ExtCapId::SERIAL, 0x1b0, &[9; 8])
        .ext(0x1b0, ExtCapId::REBAR, 0x1d0, &[1; 12])
        .ext(0x1d0, ExtCapId::ATS, 0x1e0, &[])
        .ext(0x1e0, ExtCapId::VENDOR, 0, &[1, 0, 0, 2])
        .0;
    let caps = filter(&mut image);
    assert_eq!(
        guest_walk(&image)[1..],
        [
            ext_cap(ExtCapId::SERIAL, 0x1a0),
            ext_cap(ExtCapId::VENDOR, 0x1e0)
        ]
    );
    assert_eq!(kept(&caps), guest_walk(&image));
    // The null capability in front, as vfio-pci makes it.
    assert_eq!(read_u32(&image, 0x100), 0x1a0 << 20);
    assert_eq!(image[0x104..0x1a0], [0; 0x9c]);
    assert_eq!(read_u32(&image, 0x1a4), 0x0909_0909);
    assert_eq!(caps.hidden.len(), 5);
}

#[test]
fn a_cxl_dvsec_is_hidden_and_others_are_kept() {
    let mut image = Image::express()
        .ext(0x100, ExtCapId::DVSEC, 0x140, &[0xde, 0x10, 0, 1, 7, 0])
        .ext(0x140, ExtCapId::DVSEC, 0, &[0x98, 0x1e, 0, 1, 0, 0])
        .0;
    filter(&mut image);
    assert_eq!(guest_walk(&image)[1..], [ext_cap(ExtCapId::DVSEC, 0x100)]);
}

#[test]
fn nothing_kept_leaves_an_empty_extended_list() {
    let mut image = Image::express()
        .ext(0x100, ExtCapId::AER, 0x150, &[])
        .ext(0x150, ExtCapId::SRIOV, 0, &[])
        .0;
    filter(&mut image);
    assert_eq!(read_u32(&image, 0x100), 0);
    let mut ones = Image::express().0;
    write_u32(&mut ones, 0x100, u32::MAX);
    filter(&mut ones);
    assert_eq!(read_u32(&ones, 0x100), 0);
}

#[test]
fn a_conventional_function_has_no_extended_space() {
    let mut image = Image::new()
        .first(0x40)
        .cap(0x40, CapId::PM, 0, &[])
        .ext(0x100, ExtCapId::SERIAL, 0, &[1; 8])
        .0;
    filter(&mut image);
    assert!(image[0x100..].iter().all(|&b| b == 0));
    let mut short = Image::express().0;
    short.truncate(LEGACY_CONFIG_SIZE);
    assert!(filter(&mut short).pcie.is_some());
    assert_eq!(filter(&mut [0xff; 64]), Capabilities::default());
}

#[test]
fn an_extended_loop_ends() {
    let mut image = Image::express()
        .ext(0x100, ExtCapId::SERIAL, 0x110, &[])
        .ext(0x110, ExtCapId::SERIAL, 0x100, &[])
        .0;
    filter(&mut image);
    assert_eq!(guest_walk(&image).len(), 3);
}

#[test]
fn free_space_avoids_capabilities_and_undocumented_registers() {
    let mut image = Image::express().0;
    let mut caps = filter(&mut image);
    assert_eq!(free_space(&image, &caps.kept, 8), Some(0x7c));
    image[0x80] = 1;
    assert_eq!(free_space(&image, &caps.kept, 8), Some(0x84));
    assert_eq!(free_space(&image, &caps.kept, 0x7c), Some(0x84));
    assert_eq!(free_space(&image, &caps.kept, 0x7d), None);
    let at = caps.insert(&mut image, CapId::VENDOR, &[8, b'P', b'2', b'P', 0, 0]);
    assert_eq!(at, Some(0x84));
    assert_eq!(guest_walk(&image), kept(&caps));
    assert_eq!(image[0x86..0x8a], [8, b'P', b'2', b'P']);
    assert_eq!(caps.insert(&mut image, CapId::VENDOR, &[0; 300]), None);
}

fn small_pointers() -> impl Strategy<Value = Vec<u8>> {
    // Random bytes, with the header bytes of both lists biased to be plausible.
    let bytes = prop::collection::vec(any::<u8>(), CONFIG_SIZE);
    let links = prop::collection::vec((0x40u16..0x100, 0u8..0x16, any::<u8>()), 0..30);
    let exts = prop::collection::vec((0x100u16..0x1000, 0u16..0x32, any::<u16>()), 0..60);
    (bytes, links, exts, any::<bool>()).prop_map(|(mut image, links, exts, zero)| {
        if zero {
            image.fill(0);
        }
        image[Reg::STATUS.at()] |= 0x10;
        image[Reg::CAPABILITIES.at()] = 0x40;
        let mut at = 0x40;
        for (next, id, skew) in links {
            image[usize::from(at)] = id;
            image[usize::from(at) + 1] = next as u8 | (skew & 3);
            at = next & !3;
        }
        let mut at = 0x100;
        for (next, id, version) in exts {
            write_u32(
                &mut image,
                at,
                ExtHeader::new(ExtCapId(id), version as u8, next).0,
            );
            at = next & !3;
        }
        image
    })
}

proptest! {
    #[test]
    fn any_image_ends_up_with_lists_that_end_and_do_not_overlap(mut image in small_pointers()) {
        let caps = filter(&mut image);
        prop_assert_eq!(guest_walk(&image), kept(&caps));
        let mut places = caps.kept.clone();
        places.extend(&caps.hidden);
        places.sort_by_key(|c| c.offset);
        for pair in places.windows(2) {
            prop_assert!(pair[0].end() <= pair[1].offset);
        }
        for cap in &caps.hidden {
            let null = if cap.offset == FIRST_EXT_CAP { 4 } else { 0 };
            let bytes = &image[usize::from(cap.offset) + null..usize::from(cap.end()).max(usize::from(cap.offset) + null)];
            prop_assert!(bytes.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn filtering_again_changes_nothing(mut image in small_pointers()) {
        let first = filter(&mut image);
        let before = image.clone();
        let second = filter(&mut image);
        prop_assert_eq!(&before, &image);
        prop_assert_eq!(kept(&first), kept(&second));
    }

    #[test]
    fn noise_never_panics(mut image in prop::collection::vec(any::<u8>(), 0..5000)) {
        let mut caps = filter(&mut image);
        let _ = caps.insert(&mut image, CapId::VENDOR, &[6, 0, 0, 0]);
    }
}
