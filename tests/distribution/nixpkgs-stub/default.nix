# `import nixpkgs { system, overlays, config }`: a package set of a dozen attributes. Derivations are built with what Debian has in /usr.
{
  system,
  overlays ? [ ],
  config ? { },
}:
let
  lib = import ./lib.nix;

  callWith =
    set: function: arguments:
    let
      f = if builtins.isFunction function then function else import function;
    in
    f (builtins.intersectAttrs (builtins.functionArgs f) set // arguments);

  # As in nixpkgs, nothing is refused before it is asked for, and what is not free must be permitted.
  permitted =
    package:
    lib.all (license: license.free or true) (lib.toList (package.meta.license or [ ]))
    || (config.allowUnfreePredicate or (_: false)) package
    || throw "Package ‘${package.name}’ has an unfree license, refusing to evaluate.";

  mkDerivation =
    attrs:
    let
      name = attrs.name or "${attrs.pname}-${attrs.version}";
      hooks = [
        "buildPhase"
        "installPhase"
        "buildCommand"
      ];
      script = builtins.concatStringsSep "\n" (
        lib.toList ''
          set -eu
          export PATH=/usr/bin:/bin HOME=/homeless-shelter SOURCE_DATE_EPOCH=315532800
          umask 022
          cd "''${TMPDIR:-/build}"
        ''
        ++ (if attrs ? src && attrs ? buildPhase then [ "cp -r $src source; chmod -R u+w source; cd source" ] else [ ])
        ++ builtins.filter (text: text != "") (map (hook: attrs.${hook} or "") hooks)
      );
      drv = derivation (
        builtins.removeAttrs attrs (
          hooks
          ++ [
            "meta"
            "nativeBuildInputs"
            "passthru"
            "pname"
            "version"
          ]
        )
        // {
          inherit name system;
          builder = "/bin/sh";
          args = [
            "-c"
            script
          ];
        }
      );
      package = drv // (attrs.passthru or { }) // builtins.intersectAttrs { pname = null; version = null; meta = null; } attrs // { inherit name; };
    in
    builtins.seq (permitted (attrs // { inherit name; })) package;

  runCommand = name: env: buildCommand: mkDerivation (env // { inherit name buildCommand; });

  python = {
    outPath = "/usr";
    pythonVersion = "3.11";
    pkgs = pythonPackages;
    withPackages =
      choose:
      let
        paths = lib.concatMapStringsSep ":" (package: "${package}/site") (choose pythonPackages);
      in
      runCommand "python3-env" { } ''
        mkdir -p $out/bin
        printf '#!/bin/sh\nPYTHONPATH=%s exec /usr/bin/python3 "$@"\n' ${paths} > $out/bin/python3
        chmod 755 $out/bin/python3
      '';
  };

  pythonPackages =
    let
      base = rec {
        inherit lib python runCommand;
        callPackage = callWith pythonPackages;
        hypothesis = absent "hypothesis";
        numpy = absent "numpy";
        pytest = absent "pytest";
        torch-bin = absent "torch";
        absent =
          pname:
          mkDerivation {
            inherit pname;
            version = "0";
            buildCommand = "mkdir -p $out/site";
            meta.license = if pname == "torch" then { free = false; } else { free = true; };
          };
        buildPythonPackage =
          {
            pname,
            version,
            format,
            src,
            dependencies,
            pythonImportsCheck,
            dontStrip,
            passthru,
            meta,
          }:
          mkDerivation {
            inherit pname version src meta dependencies;
            passthru = passthru // { inherit pythonImportsCheck; };
            buildCommand = ''
              mkdir -p $out/site
              /usr/bin/python3 -m zipfile -e $src $out/site
              cd $out/site
              for module in ${builtins.concatStringsSep " " pythonImportsCheck}; do /usr/bin/python3 -B -c "import $module"; done
            '';
          };
      };
    in
    base // builtins.foldl' (set: extension: set // extension (base // set) set) { } (packages.pythonPackagesExtensions or [ ]);

  # From the folder `wheelhouse` of this stub, whatever the name in it: what counts is the hash.
  fetchPypi =
    {
      pname,
      version,
      format,
      python,
      dist,
      abi,
      platform,
      sha256,
    }:
    assert format == "wheel";
    let
      file = "${pname}-${version}-${python}-${abi}-${platform}.whl";
    in
    mkDerivation {
      name = builtins.replaceStrings [ "~" ] [ "-" ] file;
      buildCommand = "cp ${./wheelhouse}/${file} $out";
      outputHash = sha256;
      outputHashAlgo = "sha256";
      outputHashMode = "flat";
    };

  base = {
    inherit
      lib
      system
      fetchPypi
      mkDerivation
      runCommand
      ;
    callPackage = callWith packages;
    python3 = python;
    stdenvNoCC = { inherit mkDerivation; };
    stdenv = {
      inherit mkDerivation;
      cc.bintools.dynamicLinker = "/lib64/ld-linux-x86-64.so.2";
      hostPlatform.parsed.cpu.name = builtins.head (lib.splitString "-" system);
    };
    mkShell = attrs: runCommand "shell" (builtins.removeAttrs attrs [ "packages" ] // { inputs = attrs.packages; }) "echo $inputs > $out";
    dockerTools.buildLayeredImage =
      {
        name,
        tag,
        contents,
        config,
      }:
      runCommand "docker-image-${name}.tar.gz" {
        inherit contents;
        CONTENT = builtins.toJSON { inherit name tag config; };
        exportReferencesGraph = [ "graph" contents ];
      } "/usr/bin/python3 -B ${./image.py} $out graph $contents";
    nixfmt = runCommand "nixfmt" { } "mkdir -p $out/bin; ln -s /bin/true $out/bin/nixfmt";
  };

  packages = builtins.foldl' (set: overlay: set // overlay packages set) base overlays;
in
packages
