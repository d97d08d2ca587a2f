// What Unity's editor does when code is reloaded: the domain is unloaded while a sidecar answers, without a word to it,
// and a new domain starts another. Prints the sidecars' process numbers.

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
        Console.ReadLine(); // until the tester has looked
    }
}
