# An image in layers, whose default command is the doctor. Load it with: gunzip < result | podman load
{
  dockerTools,
  python3,
  package,
}:
dockerTools.buildLayeredImage {
  name = "flash_kda";
  tag = package.version;
  contents = [ (python3.withPackages (_: [ package ])) ];
  config = {
    Entrypoint = [
      "/bin/python3"
      "-m"
      "flash_kda"
    ];
    Cmd = [ "doctor" ];
    User = "10001:10001";
    WorkingDir = "/tmp";
    Env = [
      "HOME=/tmp"
      "USER=flash_kda"
      "PYTHONDONTWRITEBYTECODE=1"
      # What NVIDIA's container runtime mounts the driver for.
      "NVIDIA_VISIBLE_DEVICES=all"
      "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    ];
  };
}
