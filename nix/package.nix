# flash_kda in a Python of nixpkgs, with torch as PyTorch's own wheel: torch is never compiled for this.
{
  lib,
  buildPythonPackage,
  pytest,
  python,
  runCommand,
  torch-bin,
  wheel,
}:
let
  package = buildPythonPackage {
    pname = "flash-kda";
    inherit (wheel) version;
    format = "wheel";
    src = wheel;
    dependencies = [ torch-bin ];
    # The module carries its machine code; stripping would change nothing of it, and nothing is left to strip.
    dontStrip = true;
    pythonImportsCheck = [
      "flash_kda"
      "flash_kda._native"
    ];

    # Needs a GPU in the sandbox: nix build .#default.gpuCheck, with the feature "cuda" as programs.nix-required-mounts of NixOS gives it.
    passthru.gpuCheck =
      runCommand "flash-kda-gpu-check"
        {
          nativeBuildInputs = [ (python.withPackages (_: [ package pytest ])) ];
          requiredSystemFeatures = [ "cuda" ];
        }
        ''
          python3 -m flash_kda doctor | tee $out
        '';

    meta = {
      description = "Kimi Delta Attention forward kernels for NVIDIA GPUs";
      license = [
        lib.licenses.mit
        lib.licenses.bsd3
      ];
      platforms = [
        "x86_64-linux"
        "aarch64-linux"
      ];
    };
  };
in
package
