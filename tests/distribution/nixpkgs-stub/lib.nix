# Functions of nixpkgs' lib, by their documented behaviour.
rec {
  genAttrs =
    names: f:
    builtins.listToAttrs (
      map (name: {
        inherit name;
        value = f name;
      }) names
    );
  mapAttrs = builtins.mapAttrs;
  nameValuePair = name: value: { inherit name value; };
  listToAttrs = builtins.listToAttrs;
  getName = package: package.pname or (builtins.parseDrvName package.name).name;
  all = builtins.all;
  toList = value: if builtins.isList value then value else [ value ];
  optionalString = condition: text: if condition then text else "";
  concatMapStringsSep = separator: f: list: builtins.concatStringsSep separator (map f list);
  concatMapStrings = f: list: builtins.concatStringsSep "" (map f list);
  replaceStrings = builtins.replaceStrings;
  splitString = separator: text: builtins.filter builtins.isString (builtins.split (escapeRegex separator) text);
  escapeRegex = builtins.replaceStrings [ "." "+" "*" "-" ] [ "\\." "\\+" "\\*" "-" ];
  removePrefix =
    prefix: text:
    let
      length = builtins.stringLength prefix;
    in
    if builtins.substring 0 length text == prefix then builtins.substring length (-1) text else text;
  removeSuffix =
    suffix: text:
    let
      kept = builtins.stringLength text - builtins.stringLength suffix;
    in
    if builtins.substring kept (-1) text == suffix then builtins.substring 0 kept text else text;
  licenses = {
    mit.free = true;
    bsd3.free = true;
  };
}
