"""Names of scopes that a profile shows, and by which `moejax plan` knows what a buffer of the compiled step is for."""

GRADIENT_SUMS = "gradient_sums"
KEPT = "kept"
BETWEEN_STAGES = "between_stages"
