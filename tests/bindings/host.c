/* A host that needs no model. `host` starts itself instead of a sidecar, and checks that a process is started, read and
 * ended. `host CONNECT_FILE` asks a running sidecar. */
#include <frameshard.h>
#include <stdio.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>
#define pause_for_ever() Sleep(INFINITE)
#else
#include <unistd.h>
#define pause_for_ever() pause()
#endif

/* Plays the sidecar. The name of the model says what it does. */
static int be_a_sidecar(void) {
    static char line[65536];
    if (fgets(line, sizeof line, stdin) == NULL)
        return 9;
    if (strstr(line, "\"refuse\""))
        puts("{\"error\": {\"code\": 20, \"name\": \"model_not_found\", \"message\": \"no such file\", "
             "\"retriable\": false, \"detail\": {}}}");
    else if (strstr(line, "\"hang\"")) /* does not end when its input ends */
        for (;;)
            pause_for_ever();
    fflush(stdout);
    return 3;
}

static fs_client *launch(const char *self, const char *model, const char *log_file) {
    fs_launch_options options;
    fs_client *client = NULL;
    fs_launch_options_init(&options, sizeof options);
    options.model = model;
    options.python = self;
    options.log_file = log_file;
    if (fs_launch(&options, &client) != FS_OK)
        fprintf(stderr, "%s: %s\n", model, fs_last_error(NULL));
    return client;
}

/* Returns the status with which the client closes; -1 if it does not close. */
static fs_status closes_with(fs_client *client) {
    fs_event event;
    for (int looks = 0; client != NULL && looks < 2000; ++looks) {
        fs_wait(client, 0.05);
        if (fs_poll(client, &event, sizeof event, 1) == 1 && event.type == FS_EVENT_CLOSED)
            return event.status;
    }
    return -1;
}

static int check(const char *what, int right) {
    printf("%s: %s\n", what, right ? "ok" : "FAILED");
    return !right;
}

static int processes(const char *self) {
    fs_client *client = launch(self, "refuse", NULL);
    int failed = check("a sidecar's error is heard", closes_with(client) == FS_MODEL_NOT_FOUND);
    fs_close(client, 3);
    client = launch(self, "end", NULL);
    failed += check("a sidecar that ends at once is noticed", closes_with(client) == FS_ENGINE_DIED);
    fs_close(client, 3);
    client = launch(self, "hang", NULL);
    failed += check("a sidecar that says nothing loads", client != NULL && fs_state(client) == FS_STATE_LOADING);
    fs_close(client, 0.2); /* returns when the process has ended */
    failed += check("a program that is not there is refused", launch("no/such/program", "end", NULL) == NULL);
    failed +=
        check("a log that cannot be opened is named", launch(self, "end", "no/such/folder/log") == NULL &&
                                                          strstr(fs_last_error(NULL), "cannot open no/such/") != NULL);
    return failed != 0;
}

static int talk(const char *connect_file) {
    fs_client *client = NULL;
    fs_event event = {0};
    if (fs_connect(connect_file, "host", &client) != FS_OK || fs_ask(client, "Hello!", -1, NULL, NULL) != FS_OK)
        return fprintf(stderr, "%s\n", fs_last_error(NULL)), 1;
    while (event.type != FS_EVENT_DONE && event.type != FS_EVENT_CLOSED)
        if (fs_wait(client, 1), fs_poll(client, &event, sizeof event, 1) == 1)
            printf("%s", event.type == FS_EVENT_TEXT ? event.text : ""), fflush(stdout);
    fs_close(client, 3);
    return event.type != FS_EVENT_DONE;
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "-c") == 0)
        return be_a_sidecar();
    return argc > 1 ? talk(argv[1]) : processes(argv[0]);
}
