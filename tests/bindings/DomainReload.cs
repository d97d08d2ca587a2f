// Does what Unity's editor does when code is reloaded. It unloads the application domain while a sidecar answers,
// without closing the sidecar, and starts another sidecar in a new domain. Prints the process ids of both sidecars.

using System;
using Frameshard;

public sealed class Play : MarshalByRefObject
{
    private Sidecar _sidecar;

    public ulong Enter()
    {
        _sidecar = Sidecar.Launch(new LaunchOptions
        {
            Model = Environment.GetEnvironmentVariable("FRAMESHARD_MODEL"), Device = "emulated",
            Python = Environment.GetEnvironmentVariable("FRAMESHARD_PYTHON"),
        });
        var model = _sidecar.Run(_sidecar.Ready);
        _sidecar.Ask("Tell me a long story.");
        return model.Pid;
    }
}

internal static class DomainReload
{
    private static void Main()
    {
        for (var round = 0; round < 2; round++)
        {
            var domain = AppDomain.CreateDomain("play " + round);
            var play = (Play)domain.CreateInstanceAndUnwrap(typeof(Play).Assembly.FullName, typeof(Play).FullName);
            Console.WriteLine(play.Enter());
            AppDomain.Unload(domain);
        }
        Console.ReadLine(); // stays until the test has checked the processes
    }
}
