"""HTTP: connections, access checks, request bodies, and the answers that all APIs share."""
