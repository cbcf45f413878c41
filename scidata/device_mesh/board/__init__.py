"""The board of failures: what ranks say to each other, through the common store, when one fails, dies or stops."""
