"""voicechat-client: this version holds the package's place; its content is not written yet."""
