{
  description = "The part of nixpkgs that our flake uses, on the programs of a Debian machine. For --override-input nixpkgs; see README.md.";

  outputs = _: {
    lib = import ./lib.nix;
  };
}
