//! The ids of capabilities, with names for logs. Use them through [`super::spec`].
//!
//! Source: PCI Code and ID Assignment Specification 1.15; Linux `include/uapi/linux/pci_regs.h`.
//! Invariant: an id that is not listed is shown as a number, never refused.

use std::fmt;

macro_rules! ids {
    ($(#[$doc:meta])* $name:ident($int:ty) { $($(#[$item:meta])* $id:ident = $value:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $int);

        impl $name {
            $($(#[$item])* #[doc = $text] pub const $id: Self = Self($value);)*

            /// The id's name for logs; `None` for ids that are not listed here.
            pub const fn name(self) -> Option<&'static str> {
                match self { $(Self::$id => Some($text),)* _ => None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{:#x}", self.0),
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:#x}, {self})", stringify!($name), self.0)
            }
        }
    };
}

ids! {
    /// Id of a standard capability (PCI Code and ID Assignment, "Capability IDs").
    CapId(u8) {
        NULL = 0x00, "null";
        PM = 0x01, "power management";
        AGP = 0x02, "AGP";
        VPD = 0x03, "vital product data";
        SLOT_ID = 0x04, "slot identification";
        MSI = 0x05, "MSI";
        HOT_SWAP = 0x06, "CompactPCI hot swap";
        PCI_X = 0x07, "PCI-X";
        HT = 0x08, "HyperTransport";
        VENDOR = 0x09, "vendor-specific";
        DEBUG_PORT = 0x0a, "debug port";
        CRC = 0x0b, "CompactPCI resource control";
        HOT_PLUG = 0x0c, "PCI hot-plug";
        SSVID = 0x0d, "bridge subsystem id";
        AGP8X = 0x0e, "AGP 8x";
        SECURE = 0x0f, "secure device";
        PCIE = 0x10, "PCI Express";
        MSIX = 0x11, "MSI-X";
        SATA = 0x12, "SATA index/data";
        AF = 0x13, "advanced features";
        EA = 0x14, "enhanced allocation";
        FPB = 0x15, "flattening portal bridge";
    }
}

ids! {
    /// Id of an extended capability (PCI Code and ID Assignment, "Extended Capability IDs").
    ExtCapId(u16) {
        NULL = 0x00, "null";
        AER = 0x01, "advanced error reporting";
        VC = 0x02, "virtual channel";
        SERIAL = 0x03, "device serial number";
        POWER_BUDGET = 0x04, "power budgeting";
        RC_LINK = 0x05, "root complex link declaration";
        RC_INTERNAL_LINK = 0x06, "root complex internal link control";
        RC_EVENT_COLLECTOR = 0x07, "root complex event collector";
        MFVC = 0x08, "multi-function virtual channel";
        VC9 = 0x09, "virtual channel (with MFVC)";
        RCRB = 0x0a, "root complex register block";
        VENDOR = 0x0b, "vendor-specific";
        ACS = 0x0d, "access control services";
        ARI = 0x0e, "alternative routing id";
        ATS = 0x0f, "address translation services";
        SRIOV = 0x10, "single-root I/O virtualization";
        MRIOV = 0x11, "multi-root I/O virtualization";
        MULTICAST = 0x12, "multicast";
        PRI = 0x13, "page request interface";
        REBAR = 0x15, "resizable BAR";
        DPA = 0x16, "dynamic power allocation";
        TPH = 0x17, "transaction processing hints";
        LTR = 0x18, "latency tolerance reporting";
        SECONDARY = 0x19, "secondary PCI Express";
        PMUX = 0x1a, "protocol multiplexing";
        PASID = 0x1b, "process address space id";
        LNR = 0x1c, "LN requester";
        DPC = 0x1d, "downstream port containment";
        L1SS = 0x1e, "L1 PM substates";
        PTM = 0x1f, "precision time measurement";
        M_PCIE = 0x20, "PCI Express over M-PHY";
        FRS = 0x21, "FRS queueing";
        RTR = 0x22, "readiness time reporting";
        DVSEC = 0x23, "designated vendor-specific";
        VF_REBAR = 0x24, "VF resizable BAR";
        DATA_LINK = 0x25, "data link feature";
        PHY_16GT = 0x26, "physical layer 16 GT/s";
        LANE_MARGIN = 0x27, "lane margining";
        HIERARCHY_ID = 0x28, "hierarchy id";
        NPEM = 0x29, "native PCIe enclosure management";
        PHY_32GT = 0x2a, "physical layer 32 GT/s";
        ALT_PROTOCOL = 0x2b, "alternate protocol";
        SFI = 0x2c, "system firmware intermediary";
        SHADOW = 0x2d, "shadow functions";
        DOE = 0x2e, "data object exchange";
        DEVICE3 = 0x2f, "device 3";
        IDE = 0x30, "integrity and data encryption";
        PHY_64GT = 0x31, "physical layer 64 GT/s";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_shown_by_name_or_number() {
        assert_eq!(CapId::MSIX.to_string(), "MSI-X");
        assert_eq!(CapId(0x77).to_string(), "0x77");
        assert_eq!(
            format!("{:?}", ExtCapId::ATS),
            "ExtCapId(0xf, address translation services)"
        );
    }
}
