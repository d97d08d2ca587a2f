using UnrealBuildTool;

public class UnrealTavernTarget : TargetRules
{
    public UnrealTavernTarget(TargetInfo Target) : base(Target)
    {
        Type = TargetType.Game;
        DefaultBuildSettings = BuildSettingsVersion.Latest;
        IncludeOrderVersion = EngineIncludeOrderVersion.Latest;
        ExtraModuleNames.Add("UnrealTavern");
    }
}
