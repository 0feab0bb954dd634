/*
 * map-bar BDF…: what mapping the BARs of a GiB and more of devices in the IOMMU (type1) costs, and whether something
 * done before makes it cheaper. An experiment, of which docs/assignment.md has the result; it runs in L1, as root:
 *
 *     gcc -O2 -static -o target/map-bar resources/lab/map-bar.c
 *     cargo lab run --deterministic --gpus 1 --bar-size 64G -- sh -c 'for how in plain touch prefault populate pieces; do
 *         target/map-bar $how $LAB_BDFS; done'
 *
 * plain: nothing before. touch: a read at each GiB. prefault: KVM_PRE_FAULT_MEMORY of the memslot.
 * populate: MADV_POPULATE_READ. pieces: one MAP_DMA for each GiB.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/vfio.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define GIB (1ull << 30)
#define FIRST_GPA (1ull << 40)
#define MEMORY_AND_MASTER 6

/* Linux 6.11; headers of build machines are older. */
struct pre_fault {
    uint64_t gpa, size, flags, padding[5];
};
#define PRE_FAULT_MEMORY _IOWR(KVMIO, 0xd5, struct pre_fault)

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static int container, vm, vcpu;

static int open_device(const char *bdf, int first) {
    char path[256], link[256];
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/iommu_group", bdf);
    ssize_t length = readlink(path, link, sizeof link - 1);
    must(length > 0, path);
    link[length] = 0;
    snprintf(path, sizeof path, "/dev/vfio/%s", strrchr(link, '/') + 1);
    int group = open(path, O_RDWR);
    must(group >= 0, path);
    must(!ioctl(group, VFIO_GROUP_SET_CONTAINER, &container), "VFIO_GROUP_SET_CONTAINER");
    must(!first || !ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU), "VFIO_SET_IOMMU");
    int device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bdf);
    must(device >= 0, "VFIO_GROUP_GET_DEVICE_FD");
    struct vfio_region_info config = {.argsz = sizeof config, .index = VFIO_PCI_CONFIG_REGION_INDEX};
    must(!ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &config), "VFIO_DEVICE_GET_REGION_INFO");
    uint16_t command = MEMORY_AND_MASTER;
    must(pwrite(device, &command, 2, config.offset + 4) == 2, "COMMAND");
    return device;
}

/* At an address that is congruent to the BAR modulo 1 GiB, as the kernel's biggest entries need it. */
static char *map(int device, const struct vfio_region_info *bar) {
    char *space = mmap(NULL, bar->size + GIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must(space != MAP_FAILED, "mmap");
    char *at = (char *)(((uintptr_t)space + GIB - 1) & ~(GIB - 1));
    char *mapped = mmap(at, bar->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, device, bar->offset);
    must(mapped != MAP_FAILED, "mmap of the BAR");
    return mapped;
}

static void prepare(const char *how, char *bar, uint64_t gpa, uint64_t size) {
    if (!strcmp(how, "touch"))
        for (uint64_t at = 0; at < size; at += GIB)
            *(volatile uint32_t *)(bar + at);
    if (!strcmp(how, "populate") && madvise(bar, size, MADV_POPULATE_READ))
        perror("MADV_POPULATE_READ");
    if (!strcmp(how, "prefault")) {
        struct pre_fault range = {.gpa = gpa, .size = size};
        while (range.size)
            must(!ioctl(vcpu, PRE_FAULT_MEMORY, &range) || errno == EINTR || errno == EAGAIN, "KVM_PRE_FAULT_MEMORY");
    }
}

static void map_dma(const char *how, char *bar, uint64_t gpa, uint64_t size) {
    uint64_t piece = strcmp(how, "pieces") ? size : GIB;
    for (uint64_t at = 0; at < size; at += piece) {
        struct vfio_iommu_type1_dma_map map = {
            .argsz = sizeof map,
            .flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
            .vaddr = (uintptr_t)bar + at,
            .iova = gpa + at,
            .size = piece,
        };
        must(!ioctl(container, VFIO_IOMMU_MAP_DMA, &map), "VFIO_IOMMU_MAP_DMA");
    }
}

int main(int count, char **words) {
    must(count > 2, "map-bar plain|touch|prefault|populate|pieces BDF…");
    const char *how = words[1];
    double before = 0, mapping = 0;
    uint64_t gpa = FIRST_GPA;
    container = open("/dev/vfio/vfio", O_RDWR);
    vm = ioctl(open("/dev/kvm", O_RDWR), KVM_CREATE_VM, 0);
    must(container >= 0 && vm >= 0 && !ioctl(vm, KVM_CREATE_IRQCHIP, 0), "KVM and VFIO");
    vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    for (int i = 2; i < count; i++) {
        int device = open_device(words[i], i == 2);
        for (int index = 0; index <= VFIO_PCI_BAR5_REGION_INDEX; index++) {
            struct vfio_region_info bar = {.argsz = sizeof bar, .index = index};
            if (ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &bar) || bar.size < GIB)
                continue;
            char *mapped = map(device, &bar);
            struct kvm_userspace_memory_region slot = {
                .slot = i, .guest_phys_addr = gpa, .memory_size = bar.size, .userspace_addr = (uintptr_t)mapped};
            must(!ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot), "KVM_SET_USER_MEMORY_REGION");
            double start = now();
            prepare(how, mapped, gpa, bar.size);
            before += now() - start;
            start = now();
            map_dma(how, mapped, gpa, bar.size);
            mapping += now() - start;
            gpa += bar.size;
        }
    }
    printf("%-8s before %.3f ms, MAP_DMA %.3f ms\n", how, before, mapping);
    return 0;
}
