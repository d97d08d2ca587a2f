#include <frameshard.h> /* talks to an NPC: npc MODEL.gguf "Any rooms left?" */
#include <stdio.h>

int main(int argc, char **argv) {
    fs_client *client = NULL;
    fs_event event = {0};
    fs_job_options innkeeper;
    fs_launch_options launch;
    fs_launch_options_init(&launch, sizeof launch);
    fs_job_options_init(&innkeeper, sizeof innkeeper);
    launch.model = argc > 1 ? argv[1] : "innkeeper.gguf";
    innkeeper.system = "You are Mira, a friendly innkeeper.";
    if (fs_launch(&launch, &client) || fs_ask(client, argc > 2 ? argv[2] : "Hello!", -1, &innkeeper, NULL))
        return fprintf(stderr, "%s\n", fs_last_error(NULL)), 1;
    while (event.type != FS_EVENT_DONE && event.type != FS_EVENT_FAILED) /* a game does this once a frame */
        if (fs_wait(client, 1), fs_poll(client, &event, sizeof event, 1) == 1 && event.type == FS_EVENT_TEXT)
            printf("%s", event.text), fflush(stdout);
    if (event.type == FS_EVENT_FAILED) /* also when the model cannot be loaded or the sidecar is lost */
        fprintf(stderr, "%s: %s\n", fs_status_name(event.status), event.text);
    fs_close(client, 3);
    return event.type != FS_EVENT_DONE;
}
