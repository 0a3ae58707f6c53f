# Functions for the scripts that start a virtual machine: its kernel, its files, the server of its disk. Source it with
# `set -euo pipefail` in the repository's top directory.

GUEST=${CARGO_TARGET_DIR:-target}/guest
MEMFOLD=${MEMFOLD:-${CARGO_TARGET_DIR:-target}/release/memfold}
WORK=$(mktemp -d "${TMPDIR:-/tmp}/memfold-guest.XXXXXX")
SERVER=
DISK=()
trap 'stop_server; rm -rf "$WORK"' EXIT

complain() {
    echo "${0##*/}: $*" >&2
    exit 1
}

need() {
    local program
    for program in "$@"; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || complain "no $program: run scripts/setup programs"
    done
}

# Sets KERNEL and MODULES to Debian's cloud kernel, which has virtio drivers, in apt's present version. Installs nothing.
fetch_kernel() {
    [ "$(uname -m)" = x86_64 ] || complain "only for x86_64 machines"
    if [ ! -d "$GUEST/kernel" ]; then
        mkdir -p "$GUEST"
        # The package lists may be missing, or older than the archive.
        unpack_kernel || { apt-get -qq update && unpack_kernel; } || complain "apt has no kernel: is there a network?"
        mv "$WORK/kernel" "$GUEST/kernel"
    fi
    KERNEL=$(echo "$GUEST"/kernel/boot/vmlinuz-*)
    MODULES=$(echo "$GUEST"/kernel/lib/modules/*)
}

unpack_kernel() {
    local package
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -1)
    [ -n "$package" ] && (cd "$WORK" && apt-get -qq -o APT::Sandbox::User=root download "$package") &&
        dpkg-deb -x "$WORK"/*.deb "$WORK/kernel" && rm "$WORK"/*.deb
}

# Makes the guest's files, as an initramfs: busybox, some kernel modules, programs with their libraries, and `init`.
#
#   make_initramfs INIT "MODULE..." PROGRAM...
make_initramfs() {
    local init=$1 modules=$2 root=$WORK/root version program library module
    shift 2
    version=${MODULES##*/}
    mkdir -p "$root"/{bin,programs,dev,etc,lib,lib64,mnt,proc,sys,tmp} "$root/lib/modules/$version"
    for program in busybox "$@"; do
        program=$(PATH="$PATH:/usr/sbin:/sbin" command -v "$program")
        # Besides busybox, which has simpler ones with these names.
        cp "$program" "$root/programs/"
        for library in $(ldd "$program" 2>/dev/null | grep -o '/[^ ]*'); do
            mkdir -p "$root${library%/*}"
            cp -L "$library" "$root$library"
        done
    done
    for module in $modules; do
        module=$(find "$MODULES/kernel" -name "$module.ko")
        [ -z "$module" ] || cp "$module" "$root/lib/modules/$version/"
    done
    cp "$init" "$root/init"
    chmod +x "$root/init"
    mv "$root/programs/busybox" "$root/bin/"
    busybox depmod -b "$root" "$version"
    (cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$WORK/initramfs"
}

# Serves a disk on $WORK/disk.sock.
#
#   start_server OPTION...    as for memfold blk
start_server() {
    "$MEMFOLD" blk --vhost "$WORK/disk.sock" "$@" &
    SERVER=$!
    DISK=(-chardev "socket,id=disk,path=$WORK/disk.sock" -device vhost-user-blk-pci,chardev=disk,num-queues=2)
    until [ -S "$WORK/disk.sock" ]; do
        kill -0 $SERVER 2>/dev/null || complain "the server has ended"
        sleep 0.05
    done
}

stop_server() {
    [ -z "$SERVER" ] || kill $SERVER 2>/dev/null || true
    [ -z "$SERVER" ] || wait $SERVER || true
    SERVER=
}

# Starts a guest, with the served disk as its first one, and prints its output until it halts.
#
#   boot MEMORY "KERNEL ARGUMENTS" QEMU-OPTION...
boot() {
    local memory=$1 arguments=$2 accel=${ACCEL:-tcg} cpu=max
    shift 2
    [ "$accel" = tcg ] || cpu=host
    qemu-system-x86_64 -nodefaults -no-user-config -no-reboot -display none \
        -machine "q35,memory-backend=ram,accel=$accel" -cpu $cpu -smp 2 \
        -m "$memory" -object "memory-backend-memfd,id=ram,size=$memory,share=on" \
        -kernel "$KERNEL" -initrd "$WORK/initramfs" -append "console=ttyS0 quiet no_timer_check panic=-1 $arguments" \
        -serial stdio "${DISK[@]}" "$@" </dev/null 2>"$WORK/qemu.log" |
        sed -u 's,\r$,,' || { cat "$WORK/qemu.log" >&2; complain "the guest was given up"; }
}
