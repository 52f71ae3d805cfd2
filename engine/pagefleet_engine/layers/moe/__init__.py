"""Mixtures of experts: where tokens go, the experts' matrices and their products, and what joins the results."""
