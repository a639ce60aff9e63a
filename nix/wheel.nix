# The release wheel of one Python and one setting, as python3 -m tools makes it anywhere else. The result is the file itself.
{
  lib,
  stdenv,
  stdenvNoCC,
  commit,
  machine,
  matrix,
  python,
  setting,
  source,
  toolchain,
}:
let
  version = builtins.head (builtins.match ".*\nversion = \"([^\"]+)\"\n.*" (builtins.readFile "${source}/pyproject.toml"));
  archs = lib.splitString "," setting;
  label = lib.optionalString (setting != "all") ("+" + lib.concatMapStringsSep "." (arch: "sm${arch}") archs);
  tag = "cp${lib.replaceStrings [ "." ] [ "" ] python.pythonVersion}";
  # What a build reads: a change of a test or of the documentation builds nothing again.
  read = [
    "LICENSE"
    "README.md"
    "csrc"
    "device-code.lock"
    "flash_kda"
    "licenses"
    "matrix.json"
    "pyproject.toml"
    "setup.py"
    "toolchain.lock"
    "tools"
  ];
  top = path: builtins.head (lib.splitString "/" (lib.removePrefix "${toString ../.}/" path));
  # NixOS has no loader where other systems have it; of the toolchain only ptxas asks for one, and for nothing but glibc.
  loader = stdenv.cc.bintools.dynamicLinker;
in
assert lib.all (arch: arch == "all" || matrix.archs ? ${arch}) archs || throw "flash_kda: ${setting} is none of the architectures in matrix.json";
stdenvNoCC.mkDerivation {
  name = "flash_kda-${version}${label}-${tag}-${tag}-manylinux2014_${machine}.manylinux_2_17_${machine}.whl";
  src = builtins.path {
    name = "flash_kda-source";
    path = ../.;
    filter = path: _: builtins.elem (top path) read;
  };
  nativeBuildInputs = [ python ];
  dontConfigure = true;
  dontFixup = true;

  FLASH_KDA_TOOLCHAIN_DIR = toolchain;
  FLASH_KDA_LOADER = loader;
  FLASH_KDA_CUDA_ARCHS = setting;
  FLASH_KDA_COMMIT = commit;

  buildPhase = ''
    export HOME=$TMPDIR FLASH_KDA_CACHE_DIR=$TMPDIR/cache
    ${python}/bin/python3 -B -m tools wheel --build-only
    :
  '';
  installPhase = ''
    cp dist/*.whl $out
    :
  '';

  passthru = {
    inherit loader setting version;
  };
  meta = {
    description = "Kimi Delta Attention forward kernels, as a wheel";
    license = [
      {
        spdxId = "MIT";
        free = true;
      }
    ];
  };
}
