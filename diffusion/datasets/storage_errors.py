"""What fetching a file can raise, whatever kind of store it lies in and however it is compressed."""

import sys

STORAGE_ERRORS = {
    "boto3.exceptions": ("Boto3Error",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "s3transfer.exceptions": ("RetriesExceededError", "TransferNotDoneError"),
    "urllib3.exceptions": ("HTTPError",),
    "google.api_core.exceptions": ("GoogleAPIError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "azure.core.exceptions": ("AzureError",),
    "oci.exceptions": ("ServiceError", "ClientError"),
    "databricks.sdk.errors": ("DatabricksError",),
    "paramiko.ssh_exception": ("SSHException",),
    "brotli": ("error",),
    "zlib": ("error",),
    "zstd": ("Error",),
}
"""Names by module of what clients and decompressors raise beside `_COMMON`; each is a package that may be absent."""

_COMMON = (OSError, RuntimeError, ValueError, EOFError, ImportError)


def fetch_errors() -> tuple[type[Exception], ...]:
    """Exceptions that say that a file cannot be fetched; of packages, those that this process has imported.

    No other can have raised one.
    """
    imported = [(sys.modules[module], names) for module, names in STORAGE_ERRORS.items() if module in sys.modules]
    return (*_COMMON, *(getattr(module, name) for module, names in imported for name in names))
