"""A content-addressed store that trusts no byte it has not authenticated. It knows keys and bytes, not meanings."""
