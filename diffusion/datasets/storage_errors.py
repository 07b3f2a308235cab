"""What the clients of object stores raise beside `OSError`, `RuntimeError` and `ValueError`."""

import sys

STORAGE_ERRORS = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "google.api_core.exceptions": ("GoogleAPIError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "azure.core.exceptions": ("AzureError",),
    "oci.exceptions": ("ServiceError", "ClientError"),
    "paramiko.ssh_exception": ("SSHException",),
}
"""Names by module; each client is a package that may be absent."""


def storage_errors() -> tuple[type[Exception], ...]:
    """Exceptions of the storage clients that this process has imported: no other can have raised one."""
    imported = [(sys.modules[module], names) for module, names in STORAGE_ERRORS.items() if module in sys.modules]
    return tuple(getattr(module, name) for module, names in imported for name in names)
