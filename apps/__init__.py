"""Applications beside the package, which import it and are not imported by it."""
