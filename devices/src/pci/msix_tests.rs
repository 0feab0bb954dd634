use proptest::prelude::*;

use super::super::caps::Location;
use super::*;

const ON: u16 = 1 << 15;
const MASK_ALL: u16 = 1 << 14;

fn msix(vectors: u16) -> Msix {
    Msix::new(&MsixCap {
        offset: 0xb0,
        table: Location {
            bar: 0,
            offset: 0x5200,
        },
        pba: Location {
            bar: 0,
            offset: 0xd600,
        },
        vectors,
    })
}

fn message(n: u16) -> MsiMessage {
    MsiMessage {
        address: 0x1_fee0_0000 | u64::from(n) << 12,
        data: 0x4000 | u32::from(n),
    }
}

/// Writes entry `n` as Linux does: three dwords, then vector control.
fn program(msix: &mut Msix, n: u16, masked: bool) -> Changes {
    let (at, m) = (u64::from(n) * 16, message(n));
    let mut changes = msix.write_table(at, &(m.address as u32).to_le_bytes());
    changes.extend(msix.write_table(at + 4, &((m.address >> 32) as u32).to_le_bytes()));
    changes.extend(msix.write_table(at + 8, &m.data.to_le_bytes()));
    changes.extend(msix.write_table(at + 12, &u32::from(masked).to_le_bytes()));
    changes
}

#[test]
fn ranges_follow_the_number_of_vectors() {
    // Case 5: 129 vectors, table at 0x5200, pending bits at 0xd600.
    let m = msix(129);
    assert_eq!(
        m.table_range(),
        Range::from_bounds(0x5200, 0x5200 + 129 * 16)
    );
    assert_eq!(m.pba_range(), Range::from_bounds(0xd600, 0xd600 + 24));
    assert_eq!(msix(513).table_range().len(), 513 * 16);
    assert_eq!(msix(64).pba_range().len(), 8);
    assert_eq!((msix(0).vectors(), msix(u16::MAX).vectors()), (1, 2048));
    assert_eq!((msix(2048).control(), msix(1).control()), (0x7ff, 0));
}

#[test]
fn after_a_reset_everything_is_masked_and_off() {
    let mut m = msix(4);
    program(&mut m, 1, false);
    m.write_control(ON);
    assert_eq!(m.reset(), [1]);
    assert_eq!(m.reset(), []);
    assert!(!m.enabled());
    let mut entry = [0; 16];
    m.read_table(16, &mut entry);
    assert_eq!(entry, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn enabling_gives_all_unmasked_vectors_at_once_and_nothing_else() {
    let mut m = msix(2048);
    for n in 0..64 {
        assert_eq!(
            program(&mut m, n * 3, false),
            [],
            "nothing changes while off"
        );
    }
    let changes = m.write_control(ON);
    assert_eq!(changes, (0..64).map(|n| n * 3).collect::<Vec<_>>());
    assert!(changes.iter().all(|&n| m.wanted(n) == Some(message(n))));
    assert_eq!(m.write_control(ON), [], "the same again");
    assert_eq!(m.write_control(0), changes);
    assert_eq!(m.wanted(0), None);
}

#[test]
fn enabling_with_every_vector_masked_wants_nothing() {
    let mut m = msix(8);
    assert_eq!(m.write_control(ON), []);
    assert!(m.enabled());
    assert!((0..9).all(|n| m.wanted(n).is_none()));
}

#[test]
fn linux_way_enable_masked_then_unmask_one_by_one() {
    // Case 10: function mask set while enabling, one vector unmasked, masked, unmasked.
    let mut m = msix(8);
    assert_eq!(m.write_control(ON | MASK_ALL), []);
    assert_eq!(m.control(), ON | MASK_ALL | 7);
    assert_eq!(program(&mut m, 2, true), []);
    assert_eq!(m.write_control(ON), []);
    let control = 2 * 16 + 12;
    assert_eq!(m.write_table(control, &[0; 4]), [2]);
    assert_eq!(m.wanted(2), Some(message(2)));
    assert_eq!(m.write_table(control, &[0; 4]), [], "already unmasked");
    assert_eq!(m.write_table(control, &[1, 0, 0, 0]), [2]);
    assert_eq!(m.wanted(2), None);
    assert_eq!(m.write_table(control, &[0]), [2]);
    assert_eq!(m.write_control(ON | MASK_ALL), [2]);
    assert_eq!(m.wanted(2), None);
}

#[test]
fn a_new_address_or_data_of_an_unmasked_vector_is_a_change() {
    let mut m = msix(2);
    program(&mut m, 1, false);
    m.write_control(ON);
    assert_eq!(m.write_table(16 + 8, &[7]), [1]);
    assert_eq!(m.wanted(1).unwrap().data & 0xff, 7);
    assert_eq!(
        m.write_table(16, &(message(1).address as u32).to_le_bytes()),
        []
    );
    assert_eq!(m.write_table(16, &message(3).address.to_le_bytes()), [1]);
    m.write_table(16 + 12, &[1]);
    assert_eq!(
        m.write_table(16, &message(1).address.to_le_bytes()),
        [],
        "masked"
    );
}

#[test]
fn an_access_across_two_entries_reaches_both() {
    let mut m = msix(2);
    m.write_control(ON);
    program(&mut m, 0, true);
    program(&mut m, 1, false);
    // Vector control of entry 0 and the address of entry 1.
    assert_eq!(
        m.write_table(12, &[0, 0, 0, 0, 0x10, 0xa0, 0xe0, 0xfe]),
        [0, 1]
    );
    assert_eq!(m.wanted(0), Some(message(0)));
    assert_eq!(m.wanted(1).unwrap().address, 0x1_fee0_a010);
    let mut data = [0; 8];
    m.read_table(12, &mut data);
    assert_eq!(data, [0, 0, 0, 0, 0x10, 0xa0, 0xe0, 0xfe]);
    m.read_table(28, &mut data);
    assert_eq!(
        data,
        [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
        "behind the table"
    );
    assert_eq!(m.write_table(31, &[0xff; 8]), []);
    assert_eq!(m.write_table(u64::MAX, &[0xff; 8]), []);
    m.read_table(u64::MAX, &mut data);
}

#[test]
fn reserved_bits_cannot_be_written() {
    let mut m = msix(1);
    m.write_control(0xffff);
    assert_eq!(m.control(), ON | MASK_ALL);
    m.write_table(0, &[0xff; 16]);
    let mut entry = [0; 16];
    m.read_table(0, &mut entry);
    assert_eq!(entry[..4], [0xfc, 0xff, 0xff, 0xff]);
    assert_eq!(entry[12..], [1, 0, 0, 0]);
}

#[test]
fn pending_bits_are_read_by_any_size() {
    let m = msix(70);
    let pending = |n: u16| {
        assert!(n < 70);
        matches!(n, 0 | 9 | 63 | 64 | 69)
    };
    let mut all = [0; 16];
    m.read_pba(0, &mut all, &pending);
    assert_eq!(all, [1, 2, 0, 0, 0, 0, 0, 0x80, 0x21, 0, 0, 0, 0, 0, 0, 0]);
    let mut some = [0; 3];
    m.read_pba(7, &mut some, &pending);
    assert_eq!(some, [0x80, 0x21, 0]);
    m.read_pba(15, &mut some, &pending);
    assert_eq!(some, [0, 0xff, 0xff]);
    m.read_pba(u64::MAX, &mut some, &pending);
}

#[derive(Clone, Debug)]
enum Op {
    Control(u16),
    Table(u64, Vec<u8>),
    Reset,
}

fn ops(vectors: u64) -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        2 => any::<u16>().prop_map(Op::Control),
        20 => (0..vectors * 16 + 20, prop::collection::vec(any::<u8>(), 1..=8))
            .prop_map(|(at, data)| Op::Table(at, data)),
        10 => (0..vectors, 0u8..2).prop_map(|(n, masked)| Op::Table(n * 16 + 12, vec![masked])),
        1 => Just(Op::Reset),
    ];
    prop::collection::vec(op, 0..60)
}

proptest! {
    #[test]
    fn changes_are_exactly_the_vectors_whose_wanted_state_changed(ops in ops(5)) {
        let mut m = msix(5);
        let mut model = [0u8; 80];
        (0..5).for_each(|n| model[n * 16 + 12] = 1);
        for op in ops {
            let before: Vec<_> = (0..6).map(|n| m.wanted(n)).collect();
            let changes = match op {
                Op::Control(value) => m.write_control(value),
                Op::Reset => {
                    model = [0; 80];
                    (0..5).for_each(|n| model[n * 16 + 12] = 1);
                    m.reset()
                }
                Op::Table(at, data) => {
                    for (n, byte) in data.iter().enumerate() {
                        let at = at as usize + n;
                        let mask = match at % 16 { 0 => 0xfc, 12 => 1, 13.. => 0, _ => 0xff };
                        if let Some(b) = model.get_mut(at) {
                            *b = byte & mask;
                        }
                    }
                    m.write_table(at, &data)
                }
            };
            let changed: Vec<u16> =
                (0..6).filter(|&n| m.wanted(n) != before[usize::from(n)]).collect();
            prop_assert_eq!(changes, changed);
            let mut table = [0; 80];
            m.read_table(0, &mut table);
            prop_assert_eq!(table, model);
        }
    }
}
