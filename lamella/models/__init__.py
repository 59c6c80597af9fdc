"""Model families, through transformers' own modelling code."""
