"""The router as the endpoint picker of a gateway: it says where a request goes, and the gateway carries it there."""
