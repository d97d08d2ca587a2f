using UnrealBuildTool;

public class UnrealTavernEditorTarget : TargetRules
{
    public UnrealTavernEditorTarget(TargetInfo Target) : base(Target)
    {
        Type = TargetType.Editor;
        DefaultBuildSettings = BuildSettingsVersion.Latest;
        IncludeOrderVersion = EngineIncludeOrderVersion.Latest;
        ExtraModuleNames.Add("UnrealTavern");
    }
}
