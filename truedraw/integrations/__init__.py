"""truedraw inside other engines. Nothing else imports this."""
