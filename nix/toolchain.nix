# The wheels of toolchain.lock for one machine, in a folder, under their own names. nix/wheels.json has the names, which pip finds out for
# itself; `python3 -m tools pins` writes it, with the hashes of toolchain.lock.
{
  lib,
  fetchPypi,
  runCommand,
  machine,
}:
let
  pins = builtins.fromJSON (builtins.readFile ./wheels.json);
  fetch =
    pin:
    let
      # NAME-VERSION-PYTHON-ABI-PLATFORM.whl
      part = builtins.elemAt (lib.splitString "-" (lib.removeSuffix ".whl" pin.file));
    in
    fetchPypi {
      pname = part 0;
      version = part 1;
      python = part 2;
      dist = part 2;
      abi = part 3;
      platform = part 4;
      format = "wheel";
      inherit (pin) sha256;
    };
  wanted = builtins.filter (pin: builtins.elem machine pin.machines) pins;
in
runCommand "flash-kda-toolchain"
  {
    # Most of it is NVIDIA's.
    meta.license = {
      shortName = "CUDA EULA";
      fullName = "CUDA Toolkit End User License Agreement (EULA)";
      url = "https://docs.nvidia.com/cuda/eula/index.html#cuda-toolkit-supplement-license-agreement";
      free = false;
    };
  }
  ''
    mkdir $out
    ${lib.concatMapStrings (pin: "ln -s ${fetch pin} $out/${pin.file}\n") wanted}
    :
  ''
