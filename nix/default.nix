# Everything that the flake puts out for one system.
{
  lib,
  callPackage,
  dockerTools,
  fetchPypi,
  mkShell,
  python3,
  runCommand,
  stdenvNoCC,
  stdenv,
  matrix,
  source,
  commit,
}:
let
  machine = stdenv.hostPlatform.parsed.cpu.name;

  # The pinned toolchain, as python3 -m tools takes it from FLASH_KDA_TOOLCHAIN_DIR.
  toolchain = callPackage ./toolchain.nix { inherit fetchPypi machine; };

  wheelFor =
    python: setting:
    callPackage ./wheel.nix {
      inherit
        commit
        machine
        matrix
        python
        setting
        source
        stdenv
        stdenvNoCC
        toolchain
        ;
    };

  perSetting = prefix: f: builtins.listToAttrs (map (setting: lib.nameValuePair "${prefix}-${setting}" (f setting)) matrix.settings);

  wheels = perSetting "wheel" (wheelFor python3);
  installed = perSetting "flash-kda" (
    setting: python3.pkgs.callPackage ./package.nix { wheel = wheels."wheel-${setting}"; }
  );
  images = perSetting "image" (
    setting:
    callPackage ./image.nix {
      inherit dockerTools python3;
      package = installed."flash-kda-${setting}";
    }
  );

  default = builtins.head matrix.settings;
  wheel = wheels."wheel-${default}";
  python = "${python3}/bin/python3";
in
{
  inherit wheelFor;

  packages =
    wheels
    // installed
    // images
    // {
      inherit toolchain;
      default = installed."flash-kda-${default}";
    };

  checks = {
    # Every cubin of device-code.lock is in the wheel, byte for byte, and the wheel keeps what its name and metadata promise.
    device-code = runCommand "flash-kda-device-code" { } ''
      cd ${source}
      ${python} -B -m flash_kda verify ${wheel} --lock device-code.lock > $out
    '';

    # It loads without torch, without a driver and without a GPU, and says why there is no kernel.
    import = runCommand "flash-kda-import" { } ''
      ${python} -m zipfile -e ${wheel} site
      PYTHONPATH=$PWD/site ${python} -B ${source}/tests/distribution/installed.py > $out
    '';

    # nix/wheels.json names files of the packages in toolchain.lock, with the same hashes.
    lock = runCommand "flash-kda-lock" { } ''
      cd ${source}
      ${python} -B -m tools pins --check > $out
    '';
  };

  shells =
    let
      common = {
        FLASH_KDA_TOOLCHAIN_DIR = toolchain;
        FLASH_KDA_LOADER = wheel.loader;
      };
    in
    {
      # To build: python3 -m tools wheel --build-only
      default = mkShell (common // { packages = [ python3 ]; });
      # To run the tests of the call and of the build; those that need more skip.
      test = mkShell (
        common
        // {
          packages = [
            (python3.withPackages (packages: [
              packages.hypothesis
              packages.numpy
              packages.pytest
              packages.torch-bin
            ]))
          ];
        }
      );
    };
}
