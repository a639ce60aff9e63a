"""CUDA C++ to PTX with NVRTC. Run as a script, one process per source: NVRTC serialises threads and keeps its memory.

    python nvrtc.py LIBNVRTC SOURCE PROGRAM_NAME OUTPUT OPTION...

Messages go to standard error; the exit status is 0, 1 if the source does not compile, 2 if the PTX cannot be written.
Needs nothing but ctypes.
"""

import ctypes
import sys
from pathlib import Path


def compile_to_ptx(library: str, source: bytes, name: str, options: list[str]) -> tuple[int, bytes, str]:
    """Returns (NVRTC status, PTX, compiler log). `name` is what messages and __FILE__ call the source."""
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def check(status: int) -> None:
        if status != 0:
            raise RuntimeError(nvrtc.nvrtcGetErrorString(status).decode())

    def fetch(size_function: str, data_function: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(nvrtc, size_function)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, data_function)(program, buffer))
        return buffer.raw[: size.value - 1]

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None))
    arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    log = fetch("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace").strip()
    ptx = fetch("nvrtcGetPTXSize", "nvrtcGetPTX") if status == 0 else b""
    return status, ptx, log


def main(arguments: list[str]) -> int:
    library, source, name, output, *options = arguments
    try:
        status, ptx, log = compile_to_ptx(library, Path(source).read_bytes(), name, options)
    except (OSError, RuntimeError) as error:
        print(f"NVRTC failed: {error}", file=sys.stderr)
        return 1
    if log:
        print(log, file=sys.stderr)
    if status != 0:
        return 1
    try:
        Path(output).write_bytes(ptx)
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
