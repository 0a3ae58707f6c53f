"""Lists the crates that the shipped command and library are made of.

    components.py sbom [PACKAGE...]       prints a CycloneDX 1.5 bill of materials
    components.py licenses [PACKAGE...]   prints the licence of each crate from the registry, with its texts
    components.py denied                  checks all dependencies against deny.toml

Each takes more packages than these two.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

PACKAGES = ["memfold-cli", "memfold-preload", *sys.argv[2:]]
PLATFORM = "x86_64-unknown-linux-gnu"
# zstd's COPYING is the GPL, the other of its two licences.
NAMES = ("LICENSE", "LICENCE", "COPYRIGHT", "NOTICE", "UNLICENSE")
OTHERS = ("libdeflate/COPYING",)
# Bundled C code, whose licence is in a folder of its own.
FOLDERS = ("", "zstd", "liblz4", "libdeflate")


def crates():
    """Returns the packages that the shipped ones need at run time, by name and version."""
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform", PLATFORM]
    data = json.loads(subprocess.check_output(command))
    packages = {package["id"]: package for package in data["packages"]}
    needs = {
        node["id"]: [
            dependency["pkg"]
            for dependency in node["deps"]
            if any(kind["kind"] is None for kind in dependency["dep_kinds"])
        ]
        for node in data["resolve"]["nodes"]
    }
    found, queue = set(), [id for id, package in packages.items() if package["name"] in PACKAGES]
    while queue:
        id = queue.pop()
        # A procedural macro runs in the compiler only.
        macro = any("proc-macro" in target["kind"] for target in packages[id]["targets"])
        if id not in found and not macro:
            found.add(id)
            queue += needs[id]
    key = lambda package: (package["name"], package["version"])
    return sorted((packages[id] for id in found), key=key), {id: [n for n in needs[id] if n in found] for id in found}, packages


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def checksums():
    """Returns the SHA-256 of each crate's archive from Cargo.lock."""
    found, name, version = {}, "", ""
    for line in pathlib.Path("Cargo.lock").read_text().splitlines():
        word, _, value = line.partition(" = ")
        value = value.strip('"')
        if word == "name":
            name = value
        elif word == "version":
            version = value
        elif word == "checksum":
            found[name, version] = value
    return found


def sbom():
    used, needs, packages = crates()
    sums = checksums()

    def component(package):
        entry = {
            "type": "library",
            "bom-ref": reference(package),
            "name": package["name"],
            "version": package["version"],
            "purl": reference(package),
        }
        if package["license"]:
            entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if sum := sums.get((package["name"], package["version"])):
            entry["hashes"] = [{"alg": "SHA-256", "content": sum}]
        return entry

    time = subprocess.check_output(
        ["date", "-u", "-d", "@" + os.environ["SOURCE_DATE_EPOCH"], "+%Y-%m-%dT%H:%M:%SZ"], text=True
    ).strip()
    version = next(package["version"] for package in used if package["name"] == PACKAGES[0])
    return json.dumps(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": {
                "timestamp": time,
                "component": {"type": "application", "bom-ref": "memfold", "name": "memfold", "version": version},
            },
            "components": [component(package) for package in used],
            "dependencies": [
                {"ref": "memfold", "dependsOn": [reference(p) for p in used if p["name"] in PACKAGES]}
            ]
            + [
                {"ref": reference(package), "dependsOn": sorted({reference(packages[id]) for id in needs[package["id"]]})}
                for package in used
            ],
        },
        indent=1,
    )


def licenses():
    """Each text once: a crate with the same text names the first that has it."""
    parts = ["memfold contains code of these crates, each under one of the licences that it names.\n"]
    first = {}
    for package in crates()[0]:
        if package["source"] is None:
            continue
        title = f"{package['name']} {package['version']}"
        parts.append(f"{'=' * 80}\n{title}: {package['license']}\n")
        place = pathlib.Path(package["manifest_path"]).parent
        paths = [path for folder in FOLDERS for path in sorted((place / folder).glob("*"))]
        paths = [path for path in paths if path.is_file() and path.name.upper().startswith(NAMES)]
        for path in paths + [place / other for other in OTHERS if (place / other).is_file()]:
            text, file = path.read_text(errors="replace").strip(), path.relative_to(place)
            known = first.setdefault(" ".join(text.split()), f"{title}, {file}")
            parts.append(f"--- {file}" + (f": see {known}\n" if known != f"{title}, {file}" else f"\n{text}\n"))
    return "\n".join(parts)


def denied():
    """Returns a line for each dependency whose licence or source deny.toml doesn't allow."""
    allowed = set(tomllib.loads(pathlib.Path("deny.toml").read_text())["licenses"]["allow"])
    lines = []
    for package in crates()[2].values():
        if package["source"] is None:
            continue
        name = f"{package['name']} {package['version']}"
        # A choice of licences, each possibly of several that apply together.
        choices = re.split(r" OR |/", (package["license"] or "none").replace("(", "").replace(")", ""))
        if not any(all(part.split(" WITH ")[0] in allowed for part in choice.split(" AND ")) for choice in choices):
            lines.append(f"{name}: its licence {package['license']} is not allowed")
        if not package["source"].startswith("registry+https://github.com/rust-lang/crates.io-index"):
            lines.append(f"{name}: its source {package['source']} is not allowed")
    if lines:
        sys.exit("\n".join(lines))
    return "all licences and sources are allowed"


print({"sbom": sbom, "licenses": licenses, "denied": denied}[sys.argv[1]]().rstrip())
