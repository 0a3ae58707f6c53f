# Repackages the tarball of `make dist`: copy it beside this file, then `nix run . -- run --limit 1G -- CMD`.
# Not tested: no nix was at hand.
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
        # Gives the command the path of nixpkgs' loader. The library needs only symbols of the program's own libc.
        nativeBuildInputs = [ pkgs.autoPatchelfHook pkgs.installShellFiles ];
        dontStrip = true;
        installPhase = ''
          install -D -t $out/bin memfold
          install -D -t $out/lib/memfold libmemfold_preload.so
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
