# Makes root directories of Debian releases, whose packages apt downloads and verifies, and runs commands in them. For scripts to
# read with `.`.

complain() {
    echo "$0: $*" >&2
    exit 1
}

# Downloads packages of a release with what they need, and unpacks them into WORK/root. dpkg in the root knows them as installed.
# WORK RELEASE PACKAGE...
make_root() {
    local work=$1 release=$2 keys=/usr/share/keyrings package
    shift 2
    local key=$keys/debian-archive-$release-automatic.gpg
    [ -f "$key" ] || key=$keys/debian-archive-keyring.gpg
    [ -f "$key" ] || complain "no $key: install debian-archive-keyring"
    mkdir -p "$work"/lists/partial "$work"/cache/archives/partial "$work"/root/{dev,proc,root,tmp,var/lib/dpkg/{info,updates}} \
        "$work"/root/usr/{bin,sbin,lib,lib64}
    # As in a merged /usr. Packages of old releases have files in both.
    (cd "$work/root" && ln -s usr/bin usr/sbin usr/lib usr/lib64 .)
    echo "deb [signed-by=$key] http://deb.debian.org/debian $release main" >"$work/sources"
    local options=(-o Dir::Etc::SourceList="$work/sources" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$work/lists"
        -o Dir::Cache="$work/cache" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root -q)
    apt-get "${options[@]}" update >/dev/null
    apt-get "${options[@]}" install -y --no-install-recommends --download-only "$@" >/dev/null
    for package in "$work"/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$work/root"
        dpkg-deb --field "$package" | sed '/^Package:/a Status: install ok installed'
        echo
    done >"$work/root/var/lib/dpkg/status"
    # In Debian 11 a script of the package makes this link.
    [ -e "$work/root/bin/sh" ] || ln -s dash "$work/root/bin/sh"
}

in_root='mount --rbind /dev dev && mount -t proc proc proc && exec env -i PATH=/usr/sbin:/usr/bin HOME=/root chroot . "$@"'
# Runs a command in a root directory, without a network: ROOT COMMAND...
inside() { (cd "$1" && shift && unshare -nmpf --propagation private sh -c "$in_root" sh "$@"); }

# Runs a command under memfold in 40 MiB in a root directory. What it prints must match a pattern, its peak must be below 48 MiB, and
# memory must have been folded: ROOT MEMFOLD PATTERN COMMAND...
keep_within() {
    local root=$1 memfold=$2 pattern=$3 printed peak
    shift 3
    # shellcheck disable=SC2086 # memfold may be several words
    printed=$(inside "$root" $memfold run --limit 40M --summary -- "$@" 2>&1) || complain "$root: $printed"
    grep -q "$pattern" <<<"$printed" || complain "$root: $printed"
    peak=$(sed -n 's/^memfold: peak \([0-9]*\)\..* folded [1-9].*/\1/p' <<<"$printed")
    [ "${peak:-9999}" -le 48 ] || complain "$root: its peak is past the limit, or nothing was folded: $printed"
}
