//! A sample of every variant of every error: an enum that gets a variant does not compile here until
//! the variant has one.

use std::io;
use std::path::Path;

use arch::acpi::{AcpiConfig, AcpiTooLarge};
use arch::boot::image::ImageProblem;
use arch::boot::{BootError, ImageError};
use arch::layout::{AddressRange, LayoutError};
use devices::assign::AssignError;
use devices::assign::commit::CommitError;
use devices::assign::ports::CallError;
use devices::assign::preflight::PreflightError;
use devices::bus::{Bus, BusOverlap};
use devices::debug_port::DebugPort;
use devices::host::uses::{HostUse, HostUses};
use devices::iommu::choose::IommuError;
use devices::iommu::iommufd_error::IommufdError;
use devices::iommu::type1::Type1Error;
use devices::pci::address::Bdf;
use devices::pci::bar::{BarError, BarKind};
use devices::pci::ecam::{DevfnTaken, PciBus};
use devices::pci::host_bridge::HostBridge;
use devices::pci::place_error::{Bar, Limit, Obstacle, PlaceError};
use devices::range::Range;

use crate::config::UsageError;
use crate::error::{Error, HostError};
use crate::memory::MemoryError;
use crate::memory_check::MemoryCheckError;
use crate::options::RomOption;

/// Samples of an enum's variants; all variants must be there.
macro_rules! samples {
    ($name:ident: $kind:ty { $($pattern:pat => [$($sample:expr),+],)+ }) => {
        fn $name() -> Vec<Error> {
            fn complete(error: &$kind) {
                match error {
                    $($pattern => {})+
                }
            }
            let samples: Vec<$kind> = vec![$($($sample),+),+];
            samples.iter().for_each(complete);
            samples.into_iter().map(|sample| wrap(sample.into())).collect()
        }
    };
}

/// Any error on its way to [`Error`].
enum Part {
    Whole(Error),
    Bar(BarError),
    Place(PlaceError),
    Obstacle(Obstacle),
    Problem(ImageProblem),
    Commit(CommitError),
}

macro_rules! parts {
    ($($kind:ty => $variant:ident),+) => {
        $(impl From<$kind> for Part {
            fn from(part: $kind) -> Self {
                Self::$variant(part)
            }
        })+
    };
}
parts!(BarError => Bar, PlaceError => Place, Obstacle => Obstacle, ImageProblem => Problem, CommitError => Commit);

macro_rules! wholes {
    ($($kind:ty),+) => {
        $(impl From<$kind> for Part {
            fn from(error: $kind) -> Self {
                Self::Whole(error.into())
            }
        })+
    };
}
wholes!(
    Error,
    HostError,
    MemoryError,
    MemoryCheckError,
    PreflightError,
    IommuError,
    AssignError,
    LayoutError,
    BootError
);

impl From<Type1Error> for Part {
    fn from(error: Type1Error) -> Self {
        IommuError::from(error).into()
    }
}

impl From<IommufdError> for Part {
    fn from(error: IommufdError) -> Self {
        IommuError::from(error).into()
    }
}

fn wrap(part: Part) -> Error {
    match part {
        Part::Whole(error) => error,
        Part::Bar(source) => AssignError::Bars { bdf: bdf(), source }.into(),
        Part::Place(source) => Error::Place {
            device: source.bar().map(|_| bdf()),
            source,
        },
        Part::Obstacle(obstacle) => wrap(Part::Place(PlaceError::Fixed {
            bar: bar(),
            address: 1 << 32,
            obstacle,
        })),
        Part::Problem(problem) => ImageError {
            path: "bzImage".into(),
            problem,
        }
        .into(),
        Part::Commit(error) => AssignError::Install(error).into(),
    }
}

fn bdf() -> Bdf {
    "0000:41:00.0".parse().unwrap()
}

fn bar() -> Bar {
    Bar {
        device: 0,
        bar: 2,
        size: 1 << 39,
    }
}

fn range() -> Range {
    Range::from_bounds(0, 1 << 30)
}

fn addresses() -> AddressRange {
    AddressRange::new(0, 1 << 30)
}

fn os(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn call(call: &'static str, errno: i32) -> CallError {
    CallError {
        call,
        source: os(errno),
    }
}

samples!(tops: Error {
    // Those that only pass on what has samples of its own.
    Error::Image(_) | Error::Boot(_) | Error::Layout(_) | Error::Memory(_) | Error::MemoryCheck(_)
    | Error::Host(_) | Error::Device(_) | Error::Iommu(_) | Error::Assign(_) | Error::Place { .. }
        => [ImageError { path: "initrd".into(), problem: ImageProblem::Empty("an initrd") }.into()],
    Error::Usage(UsageError::Options(_)) => [UsageError::Options("unexpected argument '--foo' found".to_owned()).into()],
    Error::Usage(UsageError::NoRom { .. }) => [UsageError::NoRom { path: "gpu.rom".into(), much: "nothing is" }.into()],
    Error::Usage(UsageError::File { .. }) => [
        UsageError::output("open the log", Path::new("/nodir/log"))(os(libc::ENOENT)).into(),
        UsageError::output("create the boot profile", Path::new("/nodir/log"))(os(libc::ENOENT)).into(),
        crate::plan::rom_source(&RomOption::File("/nodir/gpu.rom".into())).unwrap_err().into()
    ],
    Error::Acpi(_) => [Error::from(too_large())],
    Error::Kvm { .. } => [
        crate::kvm::vm::cannot_open(kvm_ioctls::Error::new(libc::ENOENT)),
        crate::kvm::vm::cannot_open(kvm_ioctls::Error::new(libc::EACCES)),
        crate::kvm::vm::cannot_open(kvm_ioctls::Error::new(libc::ENOTTY))
    ],
    Error::KvmLacks { .. } => [
        crate::kvm::vm::no_irqchip(kvm_ioctls::Error::new(libc::ENOTTY)),
        Error::KvmLacks { lack: "has no irqfd; a newer kernel is needed".to_owned() },
        Error::KvmLacks { lack: "has API version 11, not 12".to_owned() }
    ],
    Error::Call(_) => [call("KVM_CREATE_VM", libc::ENOMEM).into()],
    Error::System { .. } => [Error::system("create an eventfd")(os(libc::EMFILE))],
    Error::DeviceRequested(_) => [Error::DeviceRequested(bdf())],
    Error::Slot(_) => [Error::from(taken())],
    Error::Bus(_) => [Error::from(overlap())],
    Error::Vcpu { .. } => [Error::Vcpu { id: 0, reason: "KVM internal error".into() }],
});

fn too_large() -> AcpiTooLarge {
    let config = AcpiConfig {
        cpus: 100_000,
        mmio64: None,
    };
    arch::acpi::build(&config).unwrap_err()
}

fn taken() -> DevfnTaken {
    let mut bus = PciBus::new();
    let bridge = || std::sync::Arc::new(HostBridge::new());
    bus.insert(0, bridge()).unwrap();
    bus.insert(0, bridge()).unwrap_err()
}

fn overlap() -> BusOverlap {
    let mut bus = Bus::new();
    let device = || std::sync::Arc::new(DebugPort::new(Box::new(|_| {})));
    bus.insert(range(), device()).unwrap();
    bus.insert(range(), device()).unwrap_err()
}

samples!(hosts: HostError {
    HostError::Slots { .. } => [HostError::Slots { count: 32 }],
    HostError::NoBarAddress { .. } => [HostError::NoBarAddress { bdf: bdf(), bar: 2 }],
    HostError::KvmCpus { .. } => [HostError::KvmCpus { cpus: 9, most: 8 }],
    HostError::RamUnmappable { .. } => [HostError::RamUnmappable { range: AddressRange::new(0, 1 << 30) }],
});

samples!(images: ImageProblem {
    ImageProblem::Io(_) => [ImageProblem::Io(os(libc::ENOENT))],
    ImageProblem::Directory(_) => [ImageProblem::Directory("an initrd")],
    ImageProblem::NotAFile(_) => [ImageProblem::NotAFile("an initrd")],
    ImageProblem::Empty(_) => [ImageProblem::Empty("an initrd")],
    ImageProblem::NotAKernel(_) => [ImageProblem::NotAKernel("not a kernel")],
    ImageProblem::Truncated { .. } => [ImageProblem::Truncated { len: 1, needed: 2 }],
    ImageProblem::Unsupported(_) => [ImageProblem::Unsupported("is a zImage, which cannot be booted; expected a bzImage")],
});

samples!(boots: BootError {
    BootError::Image(_) => [BootError::Image(ImageError { path: "k".into(), problem: ImageProblem::Empty("a kernel") })],
    BootError::KernelDoesNotFit { .. } => [BootError::KernelDoesNotFit { needed: addresses(), low: 1 << 20 }],
    BootError::InitrdDoesNotFit { .. } => [BootError::InitrdDoesNotFit { len: 1 << 30, space: addresses(), limited_by_ram: true }],
    BootError::CmdlineTooLong { .. } => [BootError::CmdlineTooLong { len: 4096, limit: 2047 }],
    BootError::CmdlineNul => [BootError::CmdlineNul],
    BootError::Load(_) => [BootError::Load(linux_loader::loader::Error::MemoryOverflow)],
    BootError::Read { .. } => [BootError::Read { what: "the initrd", source: vm_memory::GuestMemoryError::HostAddressNotAvailable }],
    BootError::Write(_) => [BootError::Write(vm_memory::GuestMemoryError::HostAddressNotAvailable)],
    BootError::TooManyRanges(_) => [BootError::TooManyRanges(200)],
});

samples!(layouts: LayoutError {
    LayoutError::Granularity { .. } => [LayoutError::Granularity { size: 1, granule: 2 << 20 }],
    LayoutError::TooLarge { .. } => [LayoutError::TooLarge { size: 1 << 40, limit: 1 << 39, usable: 1 << 38 }],
});

samples!(memories: MemoryError {
    MemoryError::PagesTaken { .. } => [MemoryError::PagesTaken { needed: 1, size: 1 << 30, range: addresses(), pool: "/sys/kernel/mm/hugepages/hugepages-1048576kB".to_owned() }],
    MemoryError::Call { .. } => [MemoryError::Call { what: "map memory", range: addresses(), source: os(libc::ENOMEM) }],
});

samples!(memory_checks: MemoryCheckError {
    MemoryCheckError::HugePages { .. } => [MemoryCheckError::HugePages { needed: 4, free: 1, total: 1, size: "1G", place: "this host".to_owned(), pool: "/sys/kernel/mm/hugepages/hugepages-1048576kB".to_owned() }],
    MemoryCheckError::RamForHugePages { .. } => [MemoryCheckError::RamForHugePages { needed: 32, free: 0, size: "1G", place: "this host".to_owned(), left: 5 << 30 }],
    MemoryCheckError::NoHugePages { .. } => [MemoryCheckError::NoHugePages { size: "1G", pool: "/sys/kernel/mm/hugepages/hugepages-1048576kB".to_owned() }],
    MemoryCheckError::NoNode { .. } => [MemoryCheckError::NoNode { node: 3, present: "0-1".to_owned() }],
    MemoryCheckError::HostMemory { .. } => [MemoryCheckError::HostMemory { needed: 1 << 40, total: 1 << 38 }],
    MemoryCheckError::Locked { .. } => [MemoryCheckError::Locked { needed: 1 << 30, limit: 1 << 16 }],
});

fn used() -> HostUses {
    HostUses(vec![HostUse::Swap("/dev/nvme0n1".to_owned())])
}

samples!(preflights: PreflightError {
    PreflightError::Absent(_) => [PreflightError::Absent(bdf())],
    PreflightError::Duplicate(_) => [PreflightError::Duplicate(bdf())],
    PreflightError::NotEndpoint { .. } => [PreflightError::NotEndpoint { bdf: bdf(), header: 1 }],
    PreflightError::IommuOff(_) => [PreflightError::IommuOff(bdf())],
    PreflightError::IommuUnused { .. } => [PreflightError::IommuUnused { bdf: bdf(), option: "intel_iommu=on" }],
    PreflightError::IommuDisabled { .. } => [PreflightError::IommuDisabled { bdf: bdf(), parameter: "intel_iommu=off" }],
    PreflightError::NoGroup(_) => [PreflightError::NoGroup(bdf())],
    PreflightError::HostDriver { .. } => [
        PreflightError::HostDriver { bdf: bdf(), driver: "nvidia".to_owned(), uses: HostUses::default() },
        PreflightError::HostDriver { bdf: bdf(), driver: "nvme".to_owned(), uses: used() }
    ],
    PreflightError::NoDriver { .. } => [PreflightError::NoDriver { bdf: bdf() }],
    PreflightError::GroupMember { .. } => [
        PreflightError::GroupMember { bdf: bdf(), group: 3, member: bdf(), driver: "snd_hda_intel".to_owned(), uses: HostUses::default() },
        PreflightError::GroupMember { bdf: bdf(), group: 3, member: bdf(), driver: "nvme".to_owned(), uses: used() }
    ],
});

samples!(iommus: IommuError {
    IommuError::Type1(_) => [Type1Error::NoType1.into()],
    IommuError::Iommufd(_) => [IommufdError::NoCdev { bdf: bdf() }.into()],
    IommuError::Neither { .. } => [IommuError::Neither { iommufd: IommufdError::OpenIommu(os(libc::EACCES)), source: Type1Error::NoType1 }],
});

samples!(type1s: Type1Error {
    Type1Error::OpenContainer(_) => [Type1Error::OpenContainer(os(libc::ENOENT)), Type1Error::OpenContainer(os(libc::EACCES))],
    Type1Error::NoType1 => [Type1Error::NoType1],
    Type1Error::Container(_) => [Type1Error::Container(call("VFIO_CHECK_EXTENSION", libc::EINVAL))],
    Type1Error::OpenGroup { .. } => [
        Type1Error::OpenGroup { bdf: bdf(), group: 3, source: os(libc::EBUSY) },
        Type1Error::OpenGroup { bdf: bdf(), group: 3, source: os(libc::EACCES) },
        Type1Error::OpenGroup { bdf: bdf(), group: 3, source: os(libc::EPERM) },
        Type1Error::OpenGroup { bdf: bdf(), group: 3, source: os(libc::ENOENT) }
    ],
    Type1Error::NotViable { .. } => [Type1Error::NotViable { bdf: bdf(), group: 3 }],
    Type1Error::Attach { .. } => [
        Type1Error::Attach { bdf: bdf(), group: 3, source: call("VFIO_SET_IOMMU", libc::EPERM) },
        Type1Error::Attach { bdf: bdf(), group: 3, source: call("VFIO_SET_IOMMU", libc::EBUSY) },
        Type1Error::Attach { bdf: bdf(), group: 3, source: call("VFIO_SET_IOMMU", libc::EINVAL) }
    ],
});

samples!(iommufds: IommufdError {
    IommufdError::OpenIommu(_) => [IommufdError::OpenIommu(os(libc::ENOENT)), IommufdError::OpenIommu(os(libc::EACCES))],
    IommufdError::NoCdev { .. } => [IommufdError::NoCdev { bdf: bdf() }],
    IommufdError::OpenCdev { .. } => [IommufdError::OpenCdev { bdf: bdf(), path: "/dev/vfio/devices/vfio0".into(), source: os(libc::EACCES) }],
    IommufdError::Ioas(_) => [IommufdError::Ioas(call("IOMMU_IOAS_ALLOC", libc::ENOMEM))],
    IommufdError::Bind { .. } => [
        IommufdError::Bind { bdf: bdf(), path: "/dev/vfio/devices/vfio0".into(), source: call("VFIO_DEVICE_BIND_IOMMUFD", libc::EBUSY) },
        IommufdError::Bind { bdf: bdf(), path: "/dev/vfio/devices/vfio0".into(), source: call("VFIO_DEVICE_BIND_IOMMUFD", libc::EPERM) }
    ],
    IommufdError::Attach { .. } => [IommufdError::Attach { bdf: bdf(), source: call("VFIO_DEVICE_ATTACH_IOMMUFD_PT", libc::EINVAL) }],
});

samples!(assigns: AssignError {
    AssignError::Install(_) | AssignError::Bars { .. } => [AssignError::Bars { bdf: bdf(), source: BarError::NoUpperHalf }],
    AssignError::Open { .. } => [AssignError::Open { bdf: bdf(), source: call("VFIO_GROUP_GET_DEVICE_FD", libc::EBUSY) }, AssignError::Open { bdf: bdf(), source: call("VFIO_GROUP_GET_DEVICE_FD", libc::EINVAL) }],
    AssignError::Iommufd(_) => [AssignError::Iommufd(IommufdError::NoCdev { bdf: bdf() })],
    AssignError::Query { .. } => [AssignError::Query { bdf: bdf(), what: "BAR 2".to_owned(), source: call("VFIO_DEVICE_GET_REGION_INFO", libc::EINVAL) }],
    AssignError::Gone { .. } => [AssignError::Gone { bdf: bdf() }],
    AssignError::Unfit(_) => [AssignError::Unfit(PreflightError::NotEndpoint { bdf: bdf(), header: 1 })],
    AssignError::NoRom { .. } => [AssignError::NoRom { bdf: bdf() }],
    AssignError::NotNvidia { .. } => [AssignError::NotNvidia { bdf: bdf() }],
    AssignError::NoRoomForClique { .. } => [AssignError::NoRoomForClique { bdf: bdf() }],
    AssignError::NoSuchBar { .. } => [AssignError::NoSuchBar { bdf: bdf(), bar: 3, present: vec![0, 2] }],
    AssignError::Mmap { .. } => [AssignError::Mmap { bdf: bdf(), bar: 2, area: range(), source: call("mmap", libc::ENOMEM) }],
    AssignError::Export { .. } => [AssignError::Export { bdf: bdf(), source: call("VFIO_DEVICE_FEATURE_DMA_BUF", libc::ENOTTY) }],
    AssignError::Populate { .. } => [AssignError::Populate { range: range(), source: os(libc::ENOMEM) }, AssignError::Populate { range: range(), source: os(libc::EFAULT) }],
    AssignError::Ram { .. } => [AssignError::Ram { range: range(), source: call("VFIO_IOMMU_MAP_DMA", libc::ENOMEM) }],
});

fn commits() -> Vec<Error> {
    let sample = |source| CommitError {
        bdf: bdf(),
        bar: 2,
        area: range(),
        action: "map for other devices at",
        at: 1 << 34,
        source,
    };
    let calls = [
        call("VFIO_IOMMU_MAP_DMA", libc::ENOSPC),
        call("VFIO_IOMMU_MAP_DMA", libc::EFAULT),
        call("KVM_SET_USER_MEMORY_REGION", libc::ENOMEM),
    ];
    calls.map(|source| wrap(sample(source).into())).into()
}

samples!(bars: BarError {
    BarError::NotAPowerOfTwo { .. } => [BarError::NotAPowerOfTwo { index: 2, size: 3 }],
    BarError::ImpossibleSize { .. } => [BarError::ImpossibleSize { index: 2, size: 2, kind: BarKind::Io }],
    BarError::NoUpperHalf => [BarError::NoUpperHalf],
    BarError::UpperHalfInUse { .. } => [BarError::UpperHalfInUse { index: 3, lower: 2 }],
});

samples!(places: PlaceError {
    PlaceError::NoPorts { .. } => [PlaceError::NoPorts { bar: bar(), window: range() }],
    PlaceError::NoRoom32 { .. } => [PlaceError::NoRoom32 { bar: bar(), window: range() }],
    PlaceError::NoRoom64 { .. } => [
        PlaceError::NoRoom64 { bar: bar(), needed: 1 << 40, limit: Limit::Processor(1 << 39) },
        PlaceError::NoRoom64 { bar: bar(), needed: 1 << 40, limit: Limit::Iommu(1 << 39) }
    ],
    PlaceError::WindowTooSmall { .. } => [PlaceError::WindowTooSmall { size: 1 << 30, needed: 1 << 40 }],
    PlaceError::WindowDoesNotFit { .. } => [PlaceError::WindowDoesNotFit { size: 1 << 50, limit: Limit::Processor(1 << 46) }],
    PlaceError::Fixed { .. } => [PlaceError::Fixed { bar: bar(), address: 1, obstacle: Obstacle::Misaligned }],
});

samples!(obstacles: Obstacle {
    Obstacle::Misaligned => [Obstacle::Misaligned],
    Obstacle::TooHigh { .. } => [Obstacle::TooHigh { limit: 1 << 39 }],
    Obstacle::Ram(_) => [Obstacle::Ram(range())],
    Obstacle::Reserved(_) => [Obstacle::Reserved(range())],
    Obstacle::Iommu => [Obstacle::Iommu],
    Obstacle::OutsideWindow { .. } => [Obstacle::OutsideWindow { window: range() }],
    Obstacle::Bar(_) => [Obstacle::Bar(bar())],
});

/// Every message of an error, at least once.
pub fn all() -> Vec<Error> {
    let groups = [
        tops(),
        hosts(),
        images(),
        boots(),
        layouts(),
        memories(),
        memory_checks(),
        preflights(),
        iommus(),
        type1s(),
        iommufds(),
        assigns(),
        commits(),
        bars(),
        places(),
        obstacles(),
    ];
    groups.into_iter().flatten().collect()
}
