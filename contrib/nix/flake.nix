# Repackages the tarball of `make dist`: copy it beside this file, then `nix run . -- run --limit 1G -- CMD`. In a git repository, add both
# files to it first, because Nix sees only files that git knows. It was evaluated with a stand-in for nixpkgs, and never built.
{
  description = "Compressed memory for Linux programs, in user space";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs = { self, nixpkgs }:
    let
      pkgs = nixpkgs.legacyPackages.x86_64-linux;
      version = "0.1.0";
    in
    {
      packages.x86_64-linux.default = pkgs.stdenv.mkDerivation {
        pname = "memfold";
        inherit version;
        src = ./memfold-${version}-x86_64-linux.tar.gz;
        nativeBuildInputs = [ pkgs.installShellFiles ];
        # The library needs only the program's own libc, so there is no RPATH to set.
        dontStrip = true;
        dontPatchELF = true;
        installPhase = ''
          install -D -t $out/bin memfold
          install -D -t $out/lib/memfold libmemfold_preload.so
          patchelf --set-interpreter "$(cat $NIX_CC/nix-support/dynamic-linker)" $out/bin/memfold
          installManPage man/*.1
          installShellCompletion --bash completions/memfold --fish completions/memfold.fish --zsh completions/_memfold
        '';
        meta = {
          description = "Compressed memory for Linux programs, in user space";
          license = with pkgs.lib.licenses; [ mit asl20 ];
          platforms = [ "x86_64-linux" ];
          mainProgram = "memfold";
        };
      };
    };
}
