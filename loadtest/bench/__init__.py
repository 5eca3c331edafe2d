"""Who is faster, with how much memory, and how well."""
