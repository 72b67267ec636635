"""voicechat-server: live speech on /v1/realtime, a Trio server with one model on one thread."""
