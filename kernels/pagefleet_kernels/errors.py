"""What a caller of the kernels can get wrong.

KernelError
├── BackendUnavailableError   the asked-for backend cannot run here
├── LaunchTableError          a file of launch parameters that cannot be used
└── UnsupportedShapeError     a shape, stride or dtype that no kernel takes
"""


class KernelError(Exception):
    """Root of the errors that this package raises for its callers."""


class BackendUnavailableError(KernelError, RuntimeError):
    """The backend that was asked for cannot run on this machine or device."""


class UnsupportedShapeError(KernelError, ValueError):
    """Tensors whose shapes, strides or dtypes no kernel takes."""


class LaunchTableError(KernelError, ValueError):
    """A file of launch parameters that is missing, damaged, or of another version."""
