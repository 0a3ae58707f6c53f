#!/bin/sh
# A devcontainer feature: installs the tarball of `make dist` that lies beside this file. docs/places.md says how to use it.
set -e
cd "$(dirname "$0")"
unpacked=$(mktemp -d)
tar -xzf memfold-*-x86_64-linux.tar.gz -C "$unpacked" --strip-components=1
install -D -t /usr/local/bin "$unpacked/memfold"
install -D -t /usr/local/lib/memfold "$unpacked/libmemfold_preload.so"
rm -r "$unpacked"
