# For the scripts of `make dist` to read with `.`, from the root of the tree: names, tools, and an environment in which two builds of
# one commit give the same bytes, wherever the tree, the registry and the build output are.
PATH="$PATH:$HOME/.cargo/bin"
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
portable=$target/portable
out=$target/dist
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
name=memfold-$version-x86_64-linux
# Without git it is the first moment that a wheel, a zip file, can hold.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC

# The tools whose version is in the bytes that they write.
tools=$target/tools/dist
packages='ziglang==0.17.1 cargo-zigbuild==0.24.1 maturin==1.16.0'
if [ "$(cat "$tools/packages" 2>/dev/null)" != "$packages" ]; then
    rm -rf "$tools"
    python3 -m venv "$tools"
    # shellcheck disable=SC2086 # one word a package
    "$tools/bin/pip" --quiet --disable-pip-version-check install $packages >&2
    echo "$packages" >"$tools/packages"
fi
PATH="$tools/bin:$PATH"

# Paths in panic messages and in C's assertions.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
remapped=("$PWD=." "$target=target" "$cargo_home=cargo")
CARGO_ENCODED_RUSTFLAGS=$(printf -- '--remap-path-prefix=%s\x1f' "${remapped[@]}")
CARGO_ENCODED_RUSTFLAGS=${CARGO_ENCODED_RUSTFLAGS%$'\x1f'}
CFLAGS=$(printf -- '-ffile-prefix-map=%s ' "${remapped[@]}")
export PATH CARGO_ENCODED_RUSTFLAGS CFLAGS

# Writes a tar archive of files of a directory, always with the same bytes: DIRECTORY FILE...
archive() {
    tar -C "$1" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
        --mode='u+rw,go=rX' -c "${@:2}" | gzip -9n
}
