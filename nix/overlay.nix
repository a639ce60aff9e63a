# pkgs.flashKda: { packages, checks, shells }, and flash-kda in every Python's packages.
{
  matrix,
  source,
  commit,
}:
final: prev: {
  flashKda = final.callPackage ./default.nix { inherit matrix source commit; };

  pythonPackagesExtensions = (prev.pythonPackagesExtensions or [ ]) ++ [
    (python: _: {
      flash-kda = python.callPackage ./package.nix {
        wheel = final.flashKda.wheelFor python.python (builtins.head matrix.settings);
      };
    })
  ];
}
