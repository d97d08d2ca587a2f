/* Measures the CPU time of waiting: idle MODEL PYTHON. It also starts itself instead of a sidecar, as a silent process.
 * */
#define _POSIX_C_SOURCE 200809L
#include <frameshard.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define IDLE_S 2.0
#define MOST_CPU 0.2 /* CPU time per elapsed time; high enough for a slow and busy machine */

static int failed;

static void check(const char *what, int right) {
    printf("%s: %s\n", what, right ? "ok" : "FAILED");
    failed += !right;
}

static double clock_s(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Waits IDLE_S with fs_wait and fs_poll, as programs do, and drops the events. */
static void idle(fs_client *client, const char *where) {
    char what[200];
    fs_event event;
    double wall = clock_s(CLOCK_MONOTONIC), cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID);
    double left = IDLE_S;
    int calls = 0;
    while (left > 0) {
        ++calls;
        fs_wait(client, left);
        fs_poll(client, &event, sizeof event, 1);
        left = IDLE_S - (clock_s(CLOCK_MONOTONIC) - wall);
    }
    wall = clock_s(CLOCK_MONOTONIC) - wall;
    cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    sprintf(what, "%s: %.1f s take %.2f %% of a core, %d calls", where, wall, 100 * cpu / wall, calls);
    check(what, cpu < MOST_CPU * wall);
}

/* Polls until an event of this type has come. Returns 0 if the client closes before. */
static int until(fs_client *client, uint32_t type) {
    fs_event event = {0};
    while (event.type != type && event.type != FS_EVENT_CLOSED)
        if (fs_wait(client, 60), fs_poll(client, &event, sizeof event, 1) == 1 && event.type == FS_EVENT_CLOSED)
            fprintf(stderr, "%s: %s\n", fs_status_name(event.status), event.text);
    return event.type == type;
}

static fs_client *launch(const char *model, const char *python) {
    fs_client *client = NULL;
    fs_launch_options launch;
    fs_launch_options_init(&launch, sizeof launch);
    launch.model = model;
    launch.python = python;
    launch.device = "cpu";
    launch.n_ctx = 256;
    launch.n_parallel = 1;
    if (fs_launch(&launch, &client) != FS_OK)
        fprintf(stderr, "%s\n", fs_last_error(NULL));
    return client;
}

/* Plays the sidecar. The name of the model says what it does; then it does nothing more. */
static int be_a_sidecar(void) {
    static char line[65536];
    if (fgets(line, sizeof line, stdin) == NULL)
        return 9;
    if (strstr(line, "\"half\""))
        puts("not JSON"), fputs("{\"ready\":", stdout);
    fflush(stdout);
    if (strstr(line, "\"mute\""))
        close(1), close(2);
    while (getchar() != EOF) {
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "-c") == 0)
        return be_a_sidecar();
    if (argc < 3)
        return 2;
    const char *const silent[] = {"silent", "half", "mute"};
    for (int i = 0; i < 3; ++i) {
        fs_client *client = launch(silent[i], argv[0]);
        idle(client, silent[i]);
        fs_close(client, 3);
    }

    fs_client *client = launch(argv[1], argv[2]);
    check("is ready", until(client, FS_EVENT_READY));
    idle(client, "ready");
    double before = clock_s(CLOCK_MONOTONIC);
    fs_model model = {0};
    model.struct_size = sizeof model;
    check("a wait is as long as it may be",
          fs_get_model(client, &model) == FS_OK && fs_wait(client, 1) == 0 && clock_s(CLOCK_MONOTONIC) - before >= 1);
    kill((pid_t)model.pid, SIGKILL);
    check("closes", until(client, FS_EVENT_CLOSED));
    before = clock_s(CLOCK_MONOTONIC);
    check("nothing is waited for then", fs_wait(client, 60) == 0 && clock_s(CLOCK_MONOTONIC) - before < 30);
    fs_close(client, 3);
    return failed != 0;
}
