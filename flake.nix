{
  description = "Kimi Delta Attention forward kernels for NVIDIA GPUs: one device code, the same bits by every route";

  # The revision is that of matrix.json.
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/26861f5606e3e4d1400771b513cc63e5f70151a6";

  outputs =
    { self, nixpkgs }:
    let
      inherit (nixpkgs) lib;
      matrix = builtins.fromJSON (builtins.readFile ./matrix.json);
      # What is not free: NVIDIA's compilers, and torch-bin with the CUDA libraries that it is linked against.
      permitted = "flash-kda-toolchain|torch|triton|cuda.*|cudnn|cusparselt|nccl|libcu.*|libnv.*";
      pkgsFor = lib.genAttrs (map (machine: "${machine}-linux") matrix.machines) (
        system:
        import nixpkgs {
          inherit system;
          overlays = [ self.overlays.default ];
          config.allowUnfreePredicate = package: builtins.match permitted (lib.getName package) != null;
        }
      );
      eachSystem = f: lib.mapAttrs (_: f) pkgsFor;
    in
    {
      overlays.default = import ./nix/overlay.nix {
        inherit matrix;
        source = self;
        commit = self.rev or self.dirtyRev or "";
      };

      packages = eachSystem (pkgs: pkgs.flashKda.packages);

      checks = eachSystem (pkgs: pkgs.flashKda.checks);

      devShells = eachSystem (pkgs: pkgs.flashKda.shells);

      formatter = eachSystem (pkgs: pkgs.nixfmt);
    };
}
