"""The other ranks: their failures and deaths, and the samples that all ranks skip."""
