"""The other ranks: found out where one fails or dies, and which samples all leave out."""
